"""The times of one request, as the gateway sees it: what TTFT, TPOT and ITL are computed from.

Pure: every time is passed in, in seconds of one monotonic clock. Knows nothing of metrics and logs; the
gateway writes one canonical log line and the histograms from it.
"""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

Stage = Literal["queued", "prefilling", "waiting_for_kv", "decoding"]
"""Where a request is. The stages are disjoint and add up to the requests in flight."""


@dataclass(slots=True)
class RequestTimeline:
    """Append-only. `tokens` has one (time, number of new tokens) entry for each arrival of tokens."""

    arrived: float
    stages: list[tuple[Stage, float]] = field(default_factory=list)
    tokens: list[tuple[float, int]] = field(default_factory=list)
    finished: float | None = None

    def enter(self, stage: Stage, now: float) -> None:
        """Note a change of stage; a stage may be entered again after a retry."""
        self.stages.append((stage, now))

    def emitted(self, now: float, count: int = 1) -> None:
        """Note `count` output tokens that arrived together."""
        self.tokens.append((now, count))

    def finish(self, now: float) -> None:
        self.finished = now

    @property
    def num_tokens(self) -> int:
        return sum(count for _, count in self.tokens)

    @property
    def ttft_s(self) -> float | None:
        """Seconds from arrival to the first token; None before it."""
        return self.tokens[0][0] - self.arrived if self.tokens else None

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds per output token after the first; None with fewer than two tokens."""
        if self.num_tokens < 2:
            return None
        return (self.tokens[-1][0] - self.tokens[0][0]) / (self.num_tokens - 1)

    def itl_s(self) -> list[float]:
        """The gap before every token but the first; tokens that came together have none between."""
        gaps = [0.0] * (self.tokens[0][1] - 1) if self.tokens else []
        for (before, _), (now, count) in pairwise(self.tokens):
            gaps += [now - before] + [0.0] * (count - 1)
        return gaps

    def stage_s(self) -> dict[Stage, float]:
        """Seconds spent in each stage that was entered; the last one ends with the request."""
        spent: dict[Stage, float] = {}
        ends = [time for _, time in self.stages[1:]]
        if self.finished is not None:
            ends.append(self.finished)
        for (stage, begin), end in zip(self.stages, ends, strict=False):
            spent[stage] = spent.get(stage, 0.0) + end - begin
        return spent
