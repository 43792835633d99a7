"""How fast this engine computes prompts, from the steps it has run. Knows nothing of who asks and why."""

from common.engine.runner import BatchPlan

_DECAY = 0.95
"""What an older step still counts after each new one: the last twenty make the estimate."""


class PrefillRate:
    """Prompt tokens over the time of the steps that computed some; what else was in them is part of the cost.

    A ratio of sums, so that long prompts, which matter, count for more than short ones.
    """

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0

    def observe(self, plan: BatchPlan, seconds: float) -> None:
        """A step has taken that long."""
        tokens = sum(row.count for row in plan.rows if row.start < row.num_prompt)
        if tokens:
            self._tokens = _DECAY * self._tokens + tokens
            self._seconds = _DECAY * self._seconds + seconds

    def seconds(self, tokens: int) -> float:
        """How long so many prompt tokens will take; 0 before the first were seen."""
        return tokens * self._seconds / self._tokens if self._tokens else 0.0
