"""What a routing policy is: given the instances that may get a piece of work, which one?

Pure; a policy sees load, cached prefixes and places. Who may get the work at all is rules.py's business.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from common.ids import InstanceId, InstanceRef
from common.routing.cluster_view import Instance

Phase = Literal["prefill", "decode", "both"]

PROBE_EVERY = 32
"""An idle instance is tried at least once in so many assignments to each of its peers."""


@dataclass(frozen=True, slots=True)
class Work:
    """`num_tokens` KV tokens. `cached_blocks` says how many of its first blocks who has already: a hint.

    It names nobody who has none; and nobody at all where the asker did not name the blocks. `partners` are
    those at the other end of the KV's way: for a prefill the decodes that may pull, for a decode the prefill
    that it will pull from, for both in one nobody. At most `max_tokens` are to be generated.
    """

    num_tokens: int
    cached_blocks: Mapping[InstanceRef, int] = field(default_factory=dict)
    phase: Phase = "both"
    max_tokens: int = 1
    partners: Sequence[Instance] = ()

    def cached_tokens(self, instance: Instance) -> int:
        """How many of the tokens `instance` need not compute, as far as is known."""
        if self.phase == "decode":
            return self.num_tokens
        blocks = self.cached_blocks.get(instance.ref, 0)
        return min(self.num_tokens, blocks * instance.info.block_size)

    def uncached_tokens(self, instance: Instance) -> int:
        """How many `instance` would have to compute; of a prompt at least the last one."""
        return max(self.num_tokens - self.cached_tokens(instance), int(self.phase != "decode"))


class RoutingPolicy(Protocol):
    def choose(self, candidates: Sequence[Instance], work: Work) -> Instance:
        """One of `candidates` (at least one) for `work`."""
        ...


def turn(instance: Instance) -> tuple[int, InstanceId]:
    """The order of taking turns: lowest is who waited longest for an assignment."""
    return instance.last_assigned, instance.ref.instance


def cheapest(
    candidates: Sequence[Instance],
    cost: Callable[[Instance], float],
    close: Callable[[float], float],
    first: Callable[[Instance], float] = lambda _: 0.0,
) -> Instance:
    """Among those that cost at most `close` of the least: the lowest by `first`, then whose turn it is."""
    costs = [cost(one) for one in candidates]
    limit = close(min(costs))
    tied = (one for one, its in zip(candidates, costs, strict=True) if its <= limit)
    return min(tied, key=lambda one: (first(one), *turn(one)))


def forgotten(candidates: Sequence[Instance]) -> Instance | None:
    """An idle one that got nothing for so long that what is believed of it may be wrong; else None.

    An estimate that is too bad gets no work, and without work it never gets better.
    """
    newest = max(one.last_assigned for one in candidates)
    oldest = min((one for one in candidates if one.idle), key=turn, default=None)
    if oldest is None or newest - oldest.last_assigned <= PROBE_EVERY * len(candidates):
        return None
    return oldest
