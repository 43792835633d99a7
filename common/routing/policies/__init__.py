"""Routing policies by name."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from common.routing.policies.base import RoutingPolicy, Work
from common.routing.policies.least_tokens import LeastTokens

POLICIES: Mapping[str, Callable[[], RoutingPolicy]] = MappingProxyType({"least_tokens": LeastTokens})

__all__ = ["POLICIES", "LeastTokens", "RoutingPolicy", "Work"]
