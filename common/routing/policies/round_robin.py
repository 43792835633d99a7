"""Everybody in turn, whatever the load: for requests and instances that are all alike, and to compare with.

The turns are the view's: whoever waited longest for an assignment, so that instances may come and go.
"""

from collections.abc import Sequence

from common.routing.cluster_view import Instance
from common.routing.policies.base import Work, turn


class RoundRobin:
    """See routing/policies/base.py."""

    def choose(self, candidates: Sequence[Instance], work: Work) -> Instance:  # noqa: ARG002
        return min(candidates, key=turn)
