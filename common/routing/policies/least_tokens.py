"""The least loaded by tokens; among equals the one that waited longest for an assignment.

DistServe's rule for both phases (OSDI '24, section 4.3: prefill with the shortest queue, then the least
loaded decode), counted in tokens rather than requests because tokens are what the work costs.
"""

from collections.abc import Sequence

from common.routing.cluster_view import Instance
from common.routing.policies.base import Work, turn


class LeastTokens:
    """See routing/policies/base.py."""

    def choose(self, candidates: Sequence[Instance], work: Work) -> Instance:  # noqa: ARG002
        return min(candidates, key=lambda one: (one.tokens, *turn(one)))
