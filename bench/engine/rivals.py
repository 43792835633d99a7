"""Two servers asked the same in turn: how fast each reads a prompt, how long each takes for a step.

Pure: cells, what records of streams say of them, and the figures. Knows nothing of who was asked.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from statistics import median

from bench.records import RequestRecord
from bench.workloads import RequestSpec, fixed, requests

DECODE_PROMPT = 208
DECODE_OUTPUT = 96
"""A stream has 256 tokens on the average while it is measured."""
MIN_STEPS = 16
"""Steps in which all streams of a batch have run together, below which nothing is said of it."""


@dataclass(frozen=True, slots=True)
class PromptCell:
    """`count` prompts of `tokens` one after another, one token out; the rate is tokens over TTFT."""

    tokens: int
    count: int
    higher_is_better = True
    unit = "tok_s"

    @property
    def concurrency(self) -> int:
        return 1

    def specs(self, seed: int) -> list[RequestSpec]:
        return requests(self.count, fixed(self.tokens), fixed(1), seed=seed)

    def warm_up(self) -> list[RequestSpec]:
        return self.specs(0)[:1]

    def figure(self, records: Sequence[RequestRecord]) -> float:
        """Tokens/s, the median of the prompts."""
        return median(self.tokens / record.ttft_s for record in records if record.ttft_s)

    def name(self, what: str) -> str:
        return f"prefill_{what}_{self.tokens}"


@dataclass(frozen=True, slots=True)
class BatchCell:
    """`batch` streams at once; the figure is ms from token to token while all of them run."""

    batch: int
    higher_is_better = False
    unit = "ms"

    @property
    def concurrency(self) -> int:
        return self.batch

    def specs(self, seed: int) -> list[RequestSpec]:
        return requests(self.batch, fixed(DECODE_PROMPT), fixed(DECODE_OUTPUT), seed=seed)

    def warm_up(self) -> list[RequestSpec]:
        return [replace(spec, max_tokens=MIN_STEPS) for spec in self.specs(0)]

    def figure(self, records: Sequence[RequestRecord]) -> float:
        """ms per token of each stream. Raises ValueError when the streams hardly overlapped."""
        return 1e3 * shared_step_s(records)

    def name(self, what: str) -> str:
        return f"decode_{what}_b{self.batch}"


RivalCell = PromptCell | BatchCell

FULL: tuple[RivalCell, ...] = (
    PromptCell(128, 5),
    PromptCell(512, 5),
    PromptCell(2048, 3),
    *(BatchCell(batch) for batch in (1, 4, 8, 16)),
)
QUICK: tuple[RivalCell, ...] = (PromptCell(512, 5), BatchCell(8))


def shared_step_s(records: Sequence[RequestRecord]) -> float:
    """Seconds per token of each stream, between the last stream's first token and the first one's end.

    A server may send several tokens in one event, or hold one's text back; a stream's events therefore
    stand for its tokens in equal parts. Raises ValueError when the streams hardly overlapped.
    """
    streams = [_times(record) for record in records]
    begin = max(times[0] for times in streams)
    end = min(times[-1] for times in streams)
    steps = sum(
        sum(begin < time <= end for time in times) * record.output_tokens / len(times)
        for times, record in zip(streams, records, strict=True)
    ) / len(streams)
    if steps < MIN_STEPS:
        raise ValueError(f"{len(streams)} streams ran together for {steps:.0f} tokens only")
    return (end - begin) / steps


def _times(record: RequestRecord) -> list[float]:
    if record.ttft_s is None:
        raise ValueError("a stream had no token")
    return list(accumulate((record.due + record.ttft_s, *record.itl_s)))


@dataclass(frozen=True, slots=True)
class Duel:
    """One cell: what each server did in each round."""

    cell: RivalCell
    ours: list[float] = field(default_factory=list)
    peer: list[float] = field(default_factory=list)

    @property
    def advantages(self) -> list[float]:
        """How many times as fast as the peer we were, by round."""
        return [self._advantage(ours, peer) for ours, peer in zip(self.ours, self.peer, strict=True)]

    @property
    def advantage(self) -> float:
        return self._advantage(median(self.ours), median(self.peer))

    def figures(self) -> dict[str, float]:
        unit = self.cell.unit
        return {
            self.cell.name(f"gateway_{unit}"): median(self.ours),
            self.cell.name(f"peer_{unit}"): median(self.peer),
            self.cell.name("over_peer"): self.advantage,
        }

    def _advantage(self, ours: float, peer: float) -> float:
        return ours / peer if self.cell.higher_is_better else peer / ours
