"""What steps take on this engine, fitted to those it has run. Knows nothing of who asks and why.

The form is DistServe's (OSDI '24, appendix A) with its constants merged: a + b * tokens + c * context, where
the context of a step is the sum over its tokens of how many tokens each attends to.
"""

from collections.abc import Sequence as Seq
from itertools import combinations

from common.engine.runner import BatchPlan
from common.messages.cluster import StepCost

_DECAY = 0.98
"""What an older step still counts after each new one: the last fifty make the fit, so that it follows an
engine that gets faster (compiled now) or slower (busy neighbours)."""
_SCALES = (1.0, 1e-2, 1e-5)
"""Make the three features of a usual step about equally large, so that one ridge suits them all."""
_RIDGE = 1e-4
"""Of the mean square of the features: decides where steps are all alike, and bends nothing otherwise."""

_ALL = (0, 1, 2)


class StepTimes:
    """Least squares over the steps observed, older ones counting less, with no coefficient below 0."""

    def __init__(self) -> None:
        self._squares = [[0.0] * 3 for _ in _ALL]
        self._products = [0.0] * 3

    def observe(self, plan: BatchPlan, seconds: float) -> None:
        """A step has taken that long."""
        tokens = context = 0
        for row in plan.rows:
            tokens += row.count
            context += row.count * (2 * row.start + row.count + 1) // 2
        features = tuple(x * scale for x, scale in zip((1, tokens, context), _SCALES, strict=True))
        for i in _ALL:
            self._products[i] = _DECAY * self._products[i] + features[i] * seconds
            for j in _ALL:
                self._squares[i][j] = _DECAY * self._squares[i][j] + features[i] * features[j]

    def cost(self) -> StepCost:
        """The best fit that has no negative coefficient; all 0 before the first step."""
        if not self._squares[0][0]:
            return StepCost()
        fits = [self._fit(kept) for size in (1, 2, 3) for kept in combinations(_ALL, size)]
        best = min((fit for fit in fits if min(fit) >= 0), key=self._error)
        return StepCost(*(value * scale for value, scale in zip(best, _SCALES, strict=True)))

    def _fit(self, kept: Seq[int]) -> tuple[float, float, float]:
        """Least squares by the features in `kept` alone; the others' coefficients are 0."""
        ridge = _RIDGE * sum(self._squares[i][i] for i in _ALL) / 3
        rows = [
            [self._squares[i][j] + (ridge if i == j else 0.0) for j in kept] + [self._products[i]]
            for i in kept
        ]
        solution = dict(zip(kept, _solved(rows), strict=True))
        return solution.get(0, 0.0), solution.get(1, 0.0), solution.get(2, 0.0)

    def _error(self, fit: Seq[float]) -> float:
        """The sum of squared errors, but for a constant."""
        quadratic = sum(fit[i] * fit[j] * self._squares[i][j] for i in _ALL for j in _ALL)
        return quadratic - 2 * sum(fit[i] * self._products[i] for i in _ALL)


def _solved(rows: list[list[float]]) -> list[float]:
    """The solution of a small system that is positive definite, given as rows of [coefficients, right]."""
    size = len(rows)
    for i in range(size):
        for below in rows[i + 1 :]:
            factor = below[i] / rows[i][i]
            for j in range(i, size + 1):
                below[j] -= factor * rows[i][j]
    solution = [0.0] * size
    for i in reversed(range(size)):
        known = sum(rows[i][j] * solution[j] for j in range(i + 1, size))
        solution[i] = (rows[i][size] - known) / rows[i][i]
    return solution
