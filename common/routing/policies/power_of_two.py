"""The less loaded of two drawn at random: for many routers, whose views are all stale in the same way.

Routers that all choose the least loaded of one and the same old view choose the same one, and overrun it.
Two random choices keep nearly all of the balance without that (Mitzenmacher, "The Power of Two Choices in
Randomized Load Balancing", 2001).
"""

import random
from collections.abc import Sequence

from common.routing.cluster_view import Instance
from common.routing.policies.base import Work, turn


class PowerOfTwo:
    """See routing/policies/base.py."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, candidates: Sequence[Instance], work: Work) -> Instance:  # noqa: ARG002
        drawn = self._rng.sample(candidates, min(2, len(candidates)))
        return min(drawn, key=lambda one: (one.tokens, *turn(one)))
