"""The times of one request, as the gateway sees it: what TTFT, TPOT and stage times are computed from.

Pure: every time is passed in, in seconds of one monotonic clock. Knows nothing of metrics and logs; the
gateway writes one canonical log line and the histograms from it.
"""

from dataclasses import dataclass, field
from typing import Literal

Stage = Literal["queued", "prefilling", "waiting_for_kv", "decoding"]
"""Where a request is. The stages are disjoint and add up to the requests in flight."""


@dataclass(slots=True)
class RequestTimeline:
    """A few numbers, however long the answer: the times of the first and the last token, and their count."""

    arrived: float
    stages: list[tuple[Stage, float]] = field(default_factory=list)
    num_tokens: int = 0
    first_token: float | None = None
    last_token: float | None = None
    finished: float | None = None

    def enter(self, stage: Stage, now: float) -> None:
        """Note a change of stage; a stage may be entered again after a retry."""
        self.stages.append((stage, now))

    def emitted(self, now: float, count: int = 1) -> None:
        """Note `count` output tokens that arrived together."""
        if self.first_token is None:
            self.first_token = now
        self.last_token = now
        self.num_tokens += count

    def finish(self, now: float) -> None:
        self.finished = now

    @property
    def ttft_s(self) -> float | None:
        """Seconds from arrival to the first token; None before it."""
        return None if self.first_token is None else self.first_token - self.arrived

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds per output token after the first; None with fewer than two tokens."""
        if self.num_tokens < 2 or self.first_token is None or self.last_token is None:
            return None
        return (self.last_token - self.first_token) / (self.num_tokens - 1)

    def stage_s(self) -> dict[Stage, float]:
        """Seconds spent in each stage that was entered; the last one ends with the request."""
        spent: dict[Stage, float] = {}
        ends = [time for _, time in self.stages[1:]]
        if self.finished is not None:
            ends.append(self.finished)
        for (stage, begin), end in zip(self.stages, ends, strict=False):
            spent[stage] = spent.get(stage, 0.0) + end - begin
        return spent
