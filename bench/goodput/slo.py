"""What a request may take, and which requests kept to it.

Budgets come from one unloaded measurement and are never edited; see docs/benchmarks.md. Pure. Knows nothing
of rates and of who serves.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from bench.records import RequestRecord

TTFT_FACTOR = 6.0
TPOT_FACTORS = (2.0, 1.5, 1.2)
"""The k of k x the unloaded batch-8 step, loosest first."""
TARGETS = (0.90, 0.99)


@dataclass(frozen=True, slots=True)
class Slo:
    """Budgets in s. `name` ends the names of figures: k12 is k = 1.2."""

    name: str
    ttft_s: float
    tpot_s: float

    def met_by(self, record: RequestRecord) -> bool:
        """Whether both budgets were kept. A failed request never does; an answer of one token has no TPOT."""
        return (
            record.ok
            and record.ttft_s is not None
            and record.ttft_s <= self.ttft_s
            and (record.tpot_s is None or record.tpot_s <= self.tpot_s)
        )

    def hopeless_after(self, output_tokens: int) -> float:
        """s after which an unfinished request has missed one of the two, whichever."""
        return self.ttft_s + self.tpot_s * max(0, output_tokens - 1)

    def scaled(self, factor: float) -> "Slo":
        return Slo(self.name, self.ttft_s * factor, self.tpot_s * factor)


@dataclass(frozen=True, slots=True)
class Unloaded:
    """What one request, and eight streams together, take where nothing else runs, in s."""

    ttft_s: float
    step_s: float

    def slos(self, factors: Iterable[float] = TPOT_FACTORS) -> tuple[Slo, ...]:
        """TTFT = 6 x unloaded TTFT, TPOT = k x unloaded batch-8 step, for each k."""
        return tuple(self.slo(factor) for factor in factors)

    def slo(self, factor: float) -> Slo:
        return Slo(f"k{round(10 * factor):02d}", TTFT_FACTOR * self.ttft_s, factor * self.step_s)


@dataclass(frozen=True, slots=True)
class Objective:
    """A share of requests that has to meet an SLO: one goodput to find."""

    slo: Slo
    target: float

    @property
    def name(self) -> str:
        """As k12 for 90 %, k12_99 for 99 %."""
        return self.slo.name if self.target == TARGETS[0] else f"{self.slo.name}_{round(100 * self.target)}"

    def allows(self, missed: int, asked: float) -> bool:
        """Whether `missed` of `asked` requests still leave the target within reach."""
        return missed <= (1 - self.target) * asked + 1e-9
