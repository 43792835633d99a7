"""Where the first token would come soonest: queue, that instance's own step times, cached prefix subtracted.

Mooncake's rule for prefills (FAST '25, section 6), with step times that each worker fits to its own steps,
so that unequal machines get unequal shares. For a decode, which has no part in the TTFT: where the next
token would come soonest, the wait for room included.
"""

from collections.abc import Sequence

from common.routing.cluster_view import Instance
from common.routing.policies.base import Work, cheapest, forgotten
from common.routing.prediction import Forecast

_CLOSE = 1.1
"""Fits of equal machines differ by some percent; who takes part in such a tie takes turns."""
_CLOSE_S = 0.001


class LeastPredictedTtft:
    """See routing/policies/base.py."""

    def choose(self, candidates: Sequence[Instance], work: Work) -> Instance:
        if (unknown := forgotten(candidates)) is not None:
            return unknown
        forecast = Forecast(candidates)
        return cheapest(candidates, lambda one: forecast.delay_s(one, work), within_a_tenth)


def within_a_tenth(seconds: float) -> float:
    return _CLOSE * seconds + _CLOSE_S
