"""Where the least is left to compute: what is not cached there, what waits there, and who runs there.

A hit is worth the tokens that it saves and no more. One shared prefix therefore stays on one instance only
until the queue there has grown as long as the prefix; then a second one computes it, has it from then on, and
takes its share. NVIDIA Dynamo's KV router adds up the same two things; counting what runs in requests instead
of held tokens is ours, because a long context that is decoded costs a newcomer little more than a short one.
"""

from collections.abc import Sequence

from common.routing.cluster_view import Instance
from common.routing.policies.base import Work, cheapest, forgotten

REQUEST_TOKENS = 64
"""What one request that is running or queued counts, in prompt tokens to compute: about a step's base."""
_CLOSE_TOKENS = 32
"""Whoever is within so many tokens of the best takes turns: a block more or less decides nothing."""


class PrefixAware:
    """See routing/policies/base.py."""

    def choose(self, candidates: Sequence[Instance], work: Work) -> Instance:
        if (unknown := forgotten(candidates)) is not None:
            return unknown

        def cost(one: Instance) -> float:
            return one.tokens_to_compute + REQUEST_TOKENS * one.requests + work.uncached_tokens(one)

        return cheapest(candidates, cost, lambda least: least + _CLOSE_TOKENS)
