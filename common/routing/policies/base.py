"""What a routing policy is: given the instances that may get a piece of work, which one?

Policies are pure and see load and cached prefixes; who may get the work at all is rules.py's business.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from common.ids import InstanceRef
from common.routing.cluster_view import Instance


@dataclass(frozen=True, slots=True)
class Work:
    """`num_tokens` KV tokens. `cached_blocks` says how many of its first blocks who has already: a hint.

    It names nobody who has none; and nobody at all where the asker did not name the blocks.
    """

    num_tokens: int
    cached_blocks: Mapping[InstanceRef, int] = field(default_factory=dict)

    def cached_tokens(self, instance: Instance) -> int:
        """How many of the tokens `instance` need not compute, as far as is known."""
        blocks = self.cached_blocks.get(instance.ref, 0)
        return min(self.num_tokens, blocks * instance.info.block_size)


class RoutingPolicy(Protocol):
    def choose(self, candidates: Sequence[Instance], work: Work) -> Instance:
        """One of `candidates` (at least one) for `work`."""
        ...
