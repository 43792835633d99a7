"""Routing policies by name."""

import random
from collections.abc import Callable, Mapping
from types import MappingProxyType

from common.routing.policies.base import Phase, RoutingPolicy, Work
from common.routing.policies.least_predicted_ttft import LeastPredictedTtft
from common.routing.policies.least_tokens import LeastTokens
from common.routing.policies.nearest import Nearest
from common.routing.policies.power_of_two import PowerOfTwo
from common.routing.policies.prefix_aware import PrefixAware
from common.routing.policies.round_robin import RoundRobin

POLICIES: Mapping[str, Callable[[random.Random], RoutingPolicy]] = MappingProxyType(
    {
        "round_robin": lambda _: RoundRobin(),
        "least_tokens": lambda _: LeastTokens(),
        "least_predicted_ttft": lambda _: LeastPredictedTtft(),
        "prefix_aware": lambda _: PrefixAware(),
        "nearest": lambda _: Nearest(),
        "power_of_two": PowerOfTwo,
    }
)
"""Each is made with a source of randomness, which only those that draw use; config.py lists the names."""

SEES_PREFIXES = frozenset({"least_predicted_ttft", "prefix_aware", "nearest"})
"""Those that make use of what is cached where, so that gateways should name blocks."""

__all__ = ["POLICIES", "SEES_PREFIXES", "LeastTokens", "Phase", "RoutingPolicy", "Work"]
