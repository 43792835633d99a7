"""Where the least is left to compute, a cached token counting more than one that waits.

A prefix therefore stays on one instance until the queue there has grown to some times its length; then a
second one computes it, has it from then on, and takes its share: a shared prefix does not pile up on one.
NVIDIA Dynamo's KV router weighs the same two sums. What runs counts by requests and not by held tokens here,
because a long context that is decoded costs a newcomer little more than a short one; for a decode that pulls,
which computes nothing, the held tokens count alone (least_tokens.py).
"""

from collections.abc import Sequence

from common.routing.cluster_view import Instance
from common.routing.policies.base import Work, cheapest, forgotten
from common.routing.policies.least_tokens import LeastTokens

HIT_WORTH = 4
"""What a cached token counts: more than the work it saves, as a second copy of a prefix takes the place of
other prefixes, while a queue is gone soon. Measured in docs/decisions/0017-what-a-hit-is-worth.md."""
REQUEST_TOKENS = 64
"""What a request that is running or queued counts in tokens to compute: about its steps' share."""


class PrefixAware:
    """See routing/policies/base.py."""

    def __init__(self) -> None:
        self._pulls = LeastTokens()

    def choose(self, candidates: Sequence[Instance], work: Work) -> Instance:
        if work.phase == "decode":
            return self._pulls.choose(candidates, work)
        if (unknown := forgotten(candidates)) is not None:
            return unknown

        def cost(one: Instance) -> float:
            load = one.tokens_to_compute + REQUEST_TOKENS * one.requests
            return load + HIT_WORTH * work.uncached_tokens(one)

        return cheapest(candidates, cost, lambda least: least + REQUEST_TOKENS - 1)
