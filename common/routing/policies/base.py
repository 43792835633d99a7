"""What a routing policy is: given the instances that may get a piece of work, which one?

Policies are pure and see load only; who may get the work at all is rules.py's business.
"""

from collections.abc import Sequence
from typing import Protocol

from common.routing.cluster_view import Instance


class RoutingPolicy(Protocol):
    def choose(self, candidates: Sequence[Instance], num_tokens: int) -> Instance:
        """One of `candidates` (at least one) for work of `num_tokens` KV tokens."""
        ...
