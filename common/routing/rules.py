"""Which worker gets which job: the topologies as rules over a ClusterView.

Pure; the router service asks it per message and the planner's simulator per simulated request. Knows
nothing of transports.
"""

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Literal

from common.config import SPLIT, Topology
from common.ids import InstanceRef
from common.messages.block_hash import unpack
from common.messages.generation import SLO, DecodeRoute, DecodeRouteRequest, Rejected, Route, RouteRequest
from common.routing.admission import TooLate, in_time
from common.routing.cluster_view import ClusterView, Instance, pairable
from common.routing.pairs import Pairs
from common.routing.policies import RoutingPolicy, Work
from common.routing.prefix_index import PrefixIndex

RETRY_AFTER_S = 1.0
"""When an instance that is starting or restarting is worth another try."""

_PAIRED = "may be paired with (equal KV layout and weights, and the setting `pairs`)"


@dataclass(frozen=True, slots=True)
class RoutingRules:
    """`chunked` and `colocated` differ in the workers' scheduling, not in routing: a decode gets the job.

    Under `disaggregated`, a prompt goes straight to a decode when it is shorter than
    `local_prefill_below_tokens`, or what the decode chosen would have to compute of it is; with
    `local_prefill_fallback` every prompt does while no prefill serves. `pairs` says which decode may serve
    which prefill, and `slo_admission` whether a request is refused that is predicted to miss its SLO.
    """

    topology: Topology = "disaggregated"
    local_prefill_below_tokens: int = 0
    local_prefill_fallback: bool = False
    pairs: Pairs = field(default_factory=lambda: Pairs({}))
    slo_admission: bool = True


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
        cached = self._index.match(unpack(request.block_hashes))
        work = Work(request.prompt_tokens, cached, max_tokens=request.max_tokens)
        slo = self._budget(request)
        if self._rules.topology not in SPLIT:
            return self._local(decodes, work, slo)
        nearby = self._local_candidates(decodes, work)
        local = self._local(nearby, work, slo) if nearby else None
        if isinstance(local, Route):
            return local
        prefills = self._fitting("prefill", request.prompt_tokens, request.exclude)
        if isinstance(prefills, Rejected):
            fall_back = self._rules.local_prefill_fallback and prefills.reason == "no_prefill"
            return self._local(decodes, work, slo) if fall_back else local or prefills
        return self._split(prefills, decodes, work, slo)

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
        partners = [d for d in decodes if self.pairable(prefill, d)]
        if not partners:
            return _nobody("decode", f"{_PAIRED} {request.prefill.instance}")
        work = Work(request.num_tokens, phase="decode", max_tokens=request.max_tokens, partners=(prefill,))
        decode = self._policy.choose(partners, work)
        self._view.note_assignment(decode.ref, request.num_tokens, to_compute=0)
        return DecodeRoute(decode.ref)

    def pairable(self, prefill: Instance, decode: Instance) -> bool:
        """Whether KV may travel between the two: they fit, and no setting forbids it."""
        allowed = self._rules.pairs.allow(prefill.ref.instance, decode.ref.instance)
        return allowed and pairable(prefill.info, decode.info)

    def _budget(self, request: RouteRequest) -> SLO | None:
        """The SLO by which the request may be refused: none once it had its first attempt.

        A request's first attempts are numbered by choice (gateway/owner.py), so any later number is a retry.
        """
        first = request.key.attempt <= request.key.choice + 1
        return request.slo if first and self._rules.slo_admission else None

    def _local_candidates(self, decodes: list[Instance], work: Work) -> list[Instance]:
        """Decodes on which so little is to compute that it needs no prefill."""
        below = self._rules.local_prefill_below_tokens
        if work.num_tokens < below:
            return decodes
        if not below:
            return []
        chosen = self._policy.choose(decodes, work)
        return [chosen] if work.uncached_tokens(chosen) < below else []

    def _local(self, decodes: list[Instance], work: Work, slo: SLO | None) -> Route | Rejected:
        able = in_time(decodes, work, slo)
        if isinstance(able, TooLate):
            return _too_late(able)
        decode = self._policy.choose(able, work)
        self._view.note_assignment(decode.ref, work.num_tokens, work.uncached_tokens(decode))
        return Route(decode.ref, None)

    def _split(
        self, prefills: list[Instance], decodes: list[Instance], work: Work, slo: SLO | None
    ) -> Route | Rejected:
        paired = [p for p in prefills if any(self.pairable(p, d) for d in decodes)]
        if not paired:
            return _nobody("decode", f"{_PAIRED} a prefill instance")
        compute = replace(work, phase="prefill", partners=decodes)
        able = in_time(paired, compute, slo)
        if isinstance(able, TooLate):
            return _too_late(able)
        prefill = self._policy.choose(able, compute)
        pull = replace(work, phase="decode", partners=(prefill,))
        partners = in_time([d for d in decodes if self.pairable(prefill, d)], pull, slo)
        if isinstance(partners, TooLate):
            return _too_late(partners)
        self._view.note_assignment(prefill.ref, work.num_tokens, work.uncached_tokens(prefill))
        return Route(prefill.ref, self._policy.choose(partners, pull).ref)

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


def _too_late(why: TooLate) -> Rejected:
    return Rejected("overloaded", why.message, why.retry_after_s)


def _nobody(role: Literal["prefill", "decode"], what: str) -> Rejected:
    reason: Literal["no_prefill", "no_decode"] = "no_prefill" if role == "prefill" else "no_decode"
    return Rejected(reason, f"no {role} instance {what}", RETRY_AFTER_S)
