"""Which worker gets which job: the topologies as rules over a ClusterView.

Pure; the router service asks it per message and the planner's simulator per simulated request. Knows
nothing of transports.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from common.config import Topology
from common.ids import InstanceRef
from common.messages.block_hash import unpack
from common.messages.generation import DecodeRoute, DecodeRouteRequest, Rejected, Route, RouteRequest
from common.routing.cluster_view import ClusterView, Instance, pairable
from common.routing.policies import RoutingPolicy, Work
from common.routing.prefix_index import PrefixIndex

RETRY_AFTER_S = 1.0
"""When an instance that is starting or restarting is worth another try."""


@dataclass(frozen=True, slots=True)
class RoutingRules:
    """`chunked` and `colocated` differ in the workers' scheduling, not in routing: a decode gets the job.

    Under `disaggregated`, a prompt shorter than `local_prefill_below_tokens` goes straight to a decode, and
    with `local_prefill_fallback` every prompt does while no prefill serves.
    """

    topology: Topology = "disaggregated"
    local_prefill_below_tokens: int = 0
    local_prefill_fallback: bool = False


class RequestRouter:
    """Answers route questions and counts its answers into the view's load."""

    def __init__(
        self, view: ClusterView, policy: RoutingPolicy, rules: RoutingRules, index: PrefixIndex | None = None
    ) -> None:
        self._view = view
        self._policy = policy
        self._rules = rules
        self._index = index or PrefixIndex()

    def route(self, request: RouteRequest) -> Route | Rejected:
        """Who should take this request. Excluded incarnations are never an answer.

        Raises MessageInvalid for block hashes that are none.
        """
        decodes = self._fitting("decode", request.prompt_tokens, request.exclude)
        if isinstance(decodes, Rejected):
            return decodes
        work = Work(request.prompt_tokens, self._index.match(unpack(request.block_hashes)))
        if self._decode_prefills(request):
            return self._local(decodes, work)
        prefills = self._fitting("prefill", request.prompt_tokens, request.exclude)
        if isinstance(prefills, Rejected):
            fall_back = self._rules.local_prefill_fallback and prefills.reason == "no_prefill"
            return self._local(decodes, work) if fall_back else prefills
        paired = [p for p in prefills if any(pairable(p.info, d.info) for d in decodes)]
        if not paired:
            return _nobody("decode", "has the KV layout and weights of a prefill instance")
        prefill = self._policy.choose(paired, work)
        partners = [d for d in decodes if pairable(prefill.info, d.info)]
        self._view.note_assignment(prefill.ref, request.prompt_tokens)
        fallback = self._policy.choose(partners, Work(request.prompt_tokens))  # it pulls, cached or not
        return Route(prefill.ref, fallback.ref)

    def route_decode(self, request: DecodeRouteRequest) -> DecodeRoute | Rejected:
        """Which decode should pull the KV of a prefill that starts now."""
        prefill = self._view.get(request.prefill)
        if prefill is None:
            return _nobody(
                "decode", f"can be matched with {request.prefill.instance}, of which nothing was heard"
            )
        decodes = self._fitting("decode", request.num_tokens, request.exclude)
        if isinstance(decodes, Rejected):
            return decodes
        partners = [d for d in decodes if pairable(prefill.info, d.info)]
        if not partners:
            return _nobody("decode", f"has the KV layout and weights of {request.prefill.instance}")
        decode = self._policy.choose(partners, Work(request.num_tokens))
        self._view.note_assignment(decode.ref, request.num_tokens)
        return DecodeRoute(decode.ref)

    def _decode_prefills(self, request: RouteRequest) -> bool:
        disaggregated = self._rules.topology == "disaggregated"
        return not disaggregated or request.prompt_tokens < self._rules.local_prefill_below_tokens

    def _local(self, decodes: list[Instance], work: Work) -> Route:
        decode = self._policy.choose(decodes, work)
        self._view.note_assignment(decode.ref, work.num_tokens)
        return Route(decode.ref, None)

    def _fitting(
        self, role: Literal["prefill", "decode"], num_tokens: int, exclude: Collection[InstanceRef]
    ) -> list[Instance] | Rejected:
        """Instances of `role` that can hold `num_tokens` and one more."""
        serving = self._view.instances(role, exclude)
        if not serving:
            left = "is left that did not just fail or refuse this request"
            return _nobody(role, left if exclude else "serves at the moment")
        fitting = [one for one in serving if _capacity(one) > num_tokens]
        if not fitting:
            longest = max(_capacity(one) for one in serving)
            message = (
                f"{num_tokens} tokens and one to generate are more than the {longest} that a {role} can hold"
            )
            return Rejected("too_long", message, RETRY_AFTER_S)
        return fitting


def _capacity(instance: Instance) -> int:
    """Tokens that one sequence can have at most there; 0 in InstanceInfo is no limit."""
    info = instance.info
    limits = [limit for limit in (info.max_model_len, info.num_blocks * info.block_size) if limit > 0]
    return min(limits, default=1 << 62)


def _nobody(role: Literal["prefill", "decode"], what: str) -> Rejected:
    reason: Literal["no_prefill", "no_decode"] = "no_prefill" if role == "prefill" else "no_decode"
    return Rejected(reason, f"no {role} instance {what}", RETRY_AFTER_S)
