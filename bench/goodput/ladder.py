"""The search for goodput: which rate to try next, on a ladder of rates that all contestants share.

Rungs are whole numbers, a rate is base x step^rung, so halving a bracket of rungs is bisection in log space,
and two contestants meet at equal rates. Pure. Knows nothing of how a rate is tried.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bench.goodput.slo import Objective

Verdicts = Mapping[Objective, bool | None]
"""Whether each objective was met at a rung; None where the trial says nothing of it."""


@dataclass(frozen=True, slots=True)
class Ladder:
    """`stride` is how many rungs are taken at a time until a bracket is found."""

    base: float
    step: float
    stride: int = 2
    lowest: int = -40
    highest: int = 40

    def rate(self, rung: int) -> float:
        """Requests/s."""
        return self.base * self.step**rung

    def rung_below(self, rate: float) -> int:
        """The highest rung whose rate is not above `rate`."""
        return math.floor(math.log(rate / self.base, self.step) + 1e-9)


@dataclass(slots=True)
class Bracket:
    """Rungs at which one objective was met and missed.

    Goodput is the rate up to which everything is met: `high` is the lowest rung that missed, `low` the
    highest one below it that met, whatever luck brought above.
    """

    met: set[int] = field(default_factory=set)
    missed: set[int] = field(default_factory=set)

    @property
    def high(self) -> int | None:
        return min(self.missed, default=None)

    @property
    def low(self) -> int | None:
        high = self.high
        return max((rung for rung in self.met if high is None or rung < high), default=None)


class LadderSearch:
    """One contestant's search for several objectives at once: a trial at a rung tells something of each.

    Brackets come first, then their refinement, so that a search cut short has bounds on both sides. Among
    equals the highest rung comes first: it takes the least time.
    """

    def __init__(self, ladder: Ladder, objectives: Sequence[Objective], first: int) -> None:
        self._ladder = ladder
        self._first = min(max(first, ladder.lowest), ladder.highest)
        self.brackets = {objective: Bracket() for objective in objectives}

    def next_rung(self) -> int | None:
        """The rung to try, or None when every objective is found, or lies beyond the ladder."""
        opening, refining = list[int](), list[int]()
        for bracket in self.brackets.values():
            if (rung := self._wanted(bracket)) is not None:
                (opening if bracket.low is None or bracket.high is None else refining).append(rung)
        return max(opening or refining, default=None)

    def open_at(self, rung: int) -> list[Objective]:
        """Objectives of which a trial at `rung` could still tell something."""
        return [
            objective
            for objective, bracket in self.brackets.items()
            if (bracket.high is None or rung < bracket.high) and (bracket.low is None or rung > bracket.low)
        ]

    def record(self, rung: int, verdicts: Verdicts) -> None:
        for objective, met in verdicts.items():
            if met is not None:
                bracket = self.brackets[objective]
                (bracket.met if met else bracket.missed).add(rung)

    def _wanted(self, bracket: Bracket) -> int | None:
        low, high, ladder = bracket.low, bracket.high, self._ladder
        if low is None and high is None:
            return self._first
        if high is None:
            assert low is not None
            return min(low + ladder.stride, ladder.highest) if low < ladder.highest else None
        if low is None:
            return max(high - ladder.stride, ladder.lowest) if high > ladder.lowest else None
        return (low + high) // 2 if high - low > 1 else None
