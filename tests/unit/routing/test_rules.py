"""Routing rules per topology, and how load spreads under them."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from common.clock import VirtualClock
from common.ids import AttemptKey, InstanceId, InstanceRef, RequestId
from common.messages.block_hash import BlockHasher, pack
from common.messages.cluster import KVEvents, LoadReport, StepCost, WorkerBeat
from common.messages.generation import SLO, DecodeRoute, DecodeRouteRequest, Rejected, Route, RouteRequest
from common.routing.cluster_view import ClusterView, Instance
from common.routing.pairs import Pairs
from common.routing.policies import POLICIES, LeastTokens, Work
from common.routing.prefix_index import PrefixIndex
from common.routing.rules import RequestRouter, RoutingRules
from tests.support.fleet import ref, worker_beat

KEY = AttemptKey(RequestId("r"), 1, 0)
P1 = worker_beat("p1", "prefill")
D1 = worker_beat("d1")
D2 = worker_beat("d2")


def router(rules: RoutingRules, *beats: WorkerBeat) -> RequestRouter:
    view = ClusterView(VirtualClock())
    for beat in beats:
        view.observe(beat)
    return RequestRouter(view, LeastTokens(), rules)


def asked(tokens: int = 100, exclude: tuple[InstanceRef, ...] = ()) -> RouteRequest:
    return RouteRequest(KEY, InstanceId("g1"), tokens, 16, exclude)


def asked_decode(
    prefill: str = "p1", tokens: int = 100, exclude: tuple[InstanceRef, ...] = ()
) -> DecodeRouteRequest:
    return DecodeRouteRequest(KEY, ref(prefill), tokens, 16, exclude)


def reason(answer: Route | DecodeRoute | Rejected) -> str:
    assert isinstance(answer, Rejected), answer
    assert answer.retry_after_s > 0
    return answer.reason


def test_disaggregated_gives_a_prefill_and_a_fallback_decode() -> None:
    assert router(RoutingRules(), P1, D1).route(asked()) == Route(ref("p1"), ref("d1"))


@pytest.mark.parametrize("topology", ["chunked", "colocated"])
def test_the_others_give_a_decode_that_does_it_all(topology: str) -> None:
    rules = RoutingRules(topology=topology)  # type: ignore[arg-type]
    assert router(rules, P1, D1).route(asked()) == Route(ref("d1"), None)
    assert reason(router(rules, P1).route(asked())) == "no_decode"


def test_short_prompts_may_stay_with_decode() -> None:
    rules = RoutingRules(local_prefill_below_tokens=50)
    assert router(rules, P1, D1).route(asked(49)) == Route(ref("d1"), None)
    assert router(rules, P1, D1).route(asked(50)) == Route(ref("p1"), ref("d1"))
    assert router(rules, D1).route(asked(49)) == Route(ref("d1"), None)


def test_without_prefill_it_is_refused_or_falls_back() -> None:
    assert reason(router(RoutingRules(), D1).route(asked())) == "no_prefill"
    rules = RoutingRules(local_prefill_fallback=True)
    assert router(rules, D1).route(asked()) == Route(ref("d1"), None)
    assert router(rules, P1, D1).route(asked()) == Route(ref("p1"), ref("d1"))


def test_without_decode_it_is_refused() -> None:
    assert reason(router(RoutingRules(), P1).route(asked())) == "no_decode"
    assert reason(router(RoutingRules(), P1).route_decode(asked_decode())) == "no_decode"


def test_the_excluded_are_never_chosen() -> None:
    assert router(RoutingRules(), P1, D1, D2).route(asked(exclude=(ref("d1"),))) == Route(
        ref("p1"), ref("d2")
    )
    assert reason(router(RoutingRules(), P1, D1).route(asked(exclude=(ref("p1"),)))) == "no_prefill"
    assert router(RoutingRules(), P1, D1, D2).route_decode(asked_decode(exclude=(ref("d1"),))) == DecodeRoute(
        ref("d2")
    )


def test_only_equal_fingerprints_are_paired() -> None:
    old = worker_beat("p0", "prefill", fingerprint="old")
    other = worker_beat("d0", fingerprint="other")
    assert router(RoutingRules(), old, P1, other, D1).route(asked()) == Route(ref("p1"), ref("d1"))
    assert router(RoutingRules(), old, P1, other, D1).route_decode(asked_decode()) == DecodeRoute(ref("d1"))
    assert reason(router(RoutingRules(), old, D1).route(asked())) == "no_decode"
    assert reason(router(RoutingRules(), old, D1).route_decode(asked_decode("p0"))) == "no_decode"


def test_a_prefill_that_the_router_does_not_know_gets_no_decode() -> None:
    assert reason(router(RoutingRules(), D1).route_decode(asked_decode())) == "no_decode"


def test_prompts_that_fit_nowhere_are_too_long() -> None:
    small = worker_beat("d0", num_blocks=2, block_size=16)
    assert router(RoutingRules(), P1, D1).route(asked(999)) == Route(ref("p1"), ref("d1"))
    assert reason(router(RoutingRules(), P1, D1).route(asked(1000))) == "too_long"
    assert router(RoutingRules(), P1, small, D1).route(asked(32)) == Route(ref("p1"), ref("d1"))
    assert router(RoutingRules(), P1, small, D1).route(asked(31)) == Route(ref("p1"), ref("d0"))
    assert reason(router(RoutingRules(), P1, small).route(asked(32))) == "too_long"


def test_the_least_loaded_is_chosen_by_tokens() -> None:
    queued = worker_beat("p1", "prefill", load=LoadReport(queued_tokens=500, requests_queued=1))
    many = worker_beat("p2", "prefill", load=LoadReport(queued_tokens=400, requests_queued=9))
    assert router(RoutingRules(), queued, many, D1).route(asked()) == Route(ref("p2"), ref("d1"))


def test_assignments_spread_a_burst_between_two_beats() -> None:
    fleet = [worker_beat(f"p{n}", "prefill") for n in range(4)] + [worker_beat(f"d{n}") for n in range(5)]
    one = router(RoutingRules(), *fleet)
    prefills = [
        answer.worker for answer in (one.route(asked(500)) for _ in range(40)) if isinstance(answer, Route)
    ]
    assert {prefills.count(ref(f"p{n}")) for n in range(4)} == {10}
    decodes = [one.route_decode(asked_decode("p0")) for _ in range(50)]
    assert {decodes.count(DecodeRoute(ref(f"d{n}"))) for n in range(5)} == {10}


def test_an_idle_fleet_takes_turns() -> None:
    view = ClusterView(VirtualClock())
    one = RequestRouter(view, POLICIES["least_tokens"](random.Random(0)), RoutingRules(topology="chunked"))
    chosen = []
    for _ in range(6):
        for name in ("d1", "d2", "d3"):
            view.observe(worker_beat(name))  # each has finished its last request
        answer = one.route(asked())
        assert isinstance(answer, Route)
        chosen.append(answer.worker.instance)
    assert chosen == ["d1", "d2", "d3"] * 2


class Noting:
    """Takes the first candidate and remembers what it was shown."""

    def __init__(self) -> None:
        self.shown: list[dict[str, int]] = []

    def choose(self, candidates: Sequence[Instance], work: Work) -> Instance:
        self.shown.append({one.ref.instance: work.cached_tokens(one) for one in candidates})
        return candidates[0]


@pytest.mark.parametrize("topology", ["disaggregated", "chunked"])
def test_policies_see_what_each_candidate_has_cached(topology: str) -> None:
    view, index, policy = ClusterView(VirtualClock()), PrefixIndex(), Noting()
    hashes = BlockHasher("same", 16).hashes(range(100))
    for beat in (P1, D1, D2):
        view.observe(beat)
        index.observe(beat.info.ref, 1000, 0)
    index.apply(KVEvents(ref("p1"), 1, stored=pack(hashes[:2])))
    index.apply(KVEvents(ref("d2"), 1, stored=pack(hashes)))
    rules = RoutingRules(topology=topology)  # type: ignore[arg-type]
    one = RequestRouter(view, policy, rules, index)
    one.route(replace(asked(), block_hashes=pack(hashes)))
    one.route(asked())
    if topology == "chunked":
        assert policy.shown == [{"d1": 0, "d2": 96}, {"d1": 0, "d2": 0}]
    else:
        assert policy.shown[0::2] == [{"p1": 32}, {"p1": 0}]


def test_no_more_is_cached_than_there_are_tokens() -> None:
    view = ClusterView(VirtualClock())
    view.observe(D1)
    (instance,) = view.all()
    assert Work(20, {ref("d1"): 2}).cached_tokens(instance) == 20


@pytest.mark.parametrize("name", POLICIES)
def test_pairs_restrict_every_policy(name: str) -> None:
    rules = RoutingRules(pairs=Pairs({"p1": ("d1",), "p2": ("d[34]",), "p3": ()}))
    fleet = [worker_beat(f"p{n}", "prefill") for n in (1, 2, 3)] + [
        worker_beat(f"d{n}") for n in (1, 2, 3, 4)
    ]
    view = ClusterView(VirtualClock())
    for beat in fleet:
        view.observe(beat)
    one = RequestRouter(view, POLICIES[name](random.Random(0)), rules)
    allowed = {"p1": {"d1"}, "p2": {"d3", "d4"}}
    used = set()
    for _ in range(40):
        answer = one.route(asked())
        assert isinstance(answer, Route)
        assert answer.decode is not None
        prefill = answer.worker.instance
        bound = one.route_decode(asked_decode(prefill))
        assert isinstance(bound, DecodeRoute)
        assert {answer.decode.instance, bound.decode.instance} <= allowed[prefill]
        used.add((prefill, bound.decode.instance))
    assert used == {("p1", "d1"), ("p2", "d3"), ("p2", "d4")}
    assert reason(one.route_decode(asked_decode("p3"))) == "no_decode"
    gone = tuple(ref(name) for name in ("d1", "d3", "d4"))
    assert reason(one.route(asked(exclude=gone))) == "no_decode"


def test_a_prompt_goes_straight_to_the_decode_that_has_most_of_it() -> None:
    view, index = ClusterView(VirtualClock()), PrefixIndex()
    hashes = BlockHasher("same", 16).hashes(range(160))
    for beat in (P1, D1, D2):
        view.observe(beat)
        index.observe(beat.info.ref, 1000, 0)
    index.apply(KVEvents(ref("d2"), 1, stored=pack(hashes[:8])))
    one = RequestRouter(
        view, POLICIES["prefix_aware"](random.Random(0)), RoutingRules(local_prefill_below_tokens=64), index
    )
    known = replace(asked(160), block_hashes=pack(hashes))
    assert one.route(known) == Route(ref("d2"), None)
    assert one.route(replace(known, exclude=(ref("d2"),))) == Route(ref("p1"), ref("d1"))
    new = one.route(replace(known, block_hashes=pack(BlockHasher("same", 16).hashes(range(1, 161)))))
    assert isinstance(new, Route)
    assert new.worker == ref("p1")


def test_what_a_decode_would_compute_too_late_goes_to_a_prefill() -> None:
    cost = StepCost(token_s=0.001)
    busy = worker_beat("d1", load=LoadReport(requests_queued=9, queued_tokens=5000, cost=cost))
    free = worker_beat("p1", "prefill", load=LoadReport(cost=cost))
    one = router(RoutingRules(local_prefill_below_tokens=200), free, busy)
    assert one.route(replace(asked(), slo=SLO(ttft_s=1.0))) == Route(ref("p1"), ref("d1"))
    assert one.route(asked()) == Route(ref("d1"), None)
    alone = router(RoutingRules(local_prefill_below_tokens=200), busy)
    assert reason(alone.route(replace(asked(), slo=SLO(ttft_s=1.0)))) == "overloaded"
