"""How much a comparison takes the trouble to find out: steps of the ladder, targets, sweeps, time.

Pure data and arithmetic. Knows nothing of what is measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from bench.goodput.slo import TARGETS, Objective, Slo

REQUESTS = 100
"""At least so many at each rate."""
QUICK_MINUTES = 19.0
"""Of the 20 that a quick run has, so that it can still stop its clusters and draw its plots."""


@dataclass(frozen=True, slots=True)
class Effort:
    """`step` is the ratio of neighbouring rates. A trial is given up once `patience` times as many as a
    target allows have missed it. A sweep sends `sweep_requests` for each setting, in `sweep_s` at most.
    Without `minutes` it takes as long as it takes. Without `sweep` settings are as configured."""

    name: str
    step: float
    stride: int
    patience: float
    targets: tuple[float, ...]
    sweep_requests: int
    sweep_s: float
    minutes: float | None
    requests: int = REQUESTS
    sweep: bool = True

    @property
    def quick(self) -> bool:
        return self.minutes is not None

    def with_requests(self, requests: int) -> "Effort":
        return replace(self, requests=requests)

    def objectives(self, slos: Sequence[Slo]) -> list[Objective]:
        return [Objective(slo, target) for slo in slos for target in self.targets]

    def gave_up(self) -> list[str]:
        """What a quick run does without, one line each."""
        if not self.quick:
            return []
        return [
            f"rates are {100 * (self.step - 1):.0f} % apart ({100 * (FULL.step - 1):.0f} % in full); "
            "between them, goodput is read off a straight line",
            "goodput at 99 % is not searched for: it is read off the rates that the search for 90 % tried",
            f"the sweep tries fewer settings, with up to {self.sweep_requests} requests each "
            f"({FULL.sweep_requests} in full)",
            "a rate is given up as soon as no target that is still sought can be met there",
            f"it ends after {self.minutes:.0f} minutes; what it had not found by then is shown as a bound",
        ]


FULL = Effort(
    "full", step=1.12, stride=4, patience=2.0, targets=TARGETS, sweep_requests=100, sweep_s=600, minutes=None
)
QUICK = Effort(
    "quick",
    step=1.25,
    stride=2,
    patience=1.0,
    targets=TARGETS[:1],
    sweep_requests=40,
    sweep_s=20,
    minutes=QUICK_MINUTES,
)


class TimeLimit:
    """What is left of `minutes` from `began` on, and whether another trial fits."""

    def __init__(self, began: float, minutes: float | None) -> None:
        self._end = None if minutes is None else began + 60 * minutes

    def allows(self, seconds: float, now: float, contenders: int) -> bool:
        """Whether a trial of so many seconds may begin: none may take more than twice its share of the rest,
        lest the slowest contestant leave nothing to the others."""
        if self._end is None:
            return True
        left = self._end - now
        return seconds <= left and seconds <= max(2 * left / max(contenders, 1), 60.0)
