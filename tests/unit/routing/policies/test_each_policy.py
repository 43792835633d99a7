"""What each policy is for, on fleets where the others would choose differently."""

from collections import Counter
from dataclasses import replace

import pytest

from common.messages.cluster import StepCost
from common.routing.cluster_view import Instance
from common.routing.policies import Work
from common.routing.policies.nearest import HOP_GBPS, hop, transfer_s
from tests.support.fleet import info, ref
from tests.support.routing import COST, instances, loaded, policy, view_of


def choice(name: str, candidates: list[Instance], work: Work) -> str:
    return policy(name).choose(candidates, work).ref.instance


def test_round_robin_does_not_look_at_load() -> None:
    view = view_of([loaded("d0", queued=9000, running=9), loaded("d1")])
    chosen = []
    for _ in range(4):
        instance = policy("round_robin").choose(view.instances("decode"), Work(100))
        view.note_assignment(instance.ref, 100)
        chosen.append(instance.ref.instance)
    assert chosen == ["d0", "d1", "d0", "d1"]


def test_least_predicted_ttft_knows_who_is_fast() -> None:
    """Twice the queue at a fifth of the time per token is still sooner."""
    fast = replace(COST, token_s=COST.token_s / 5)
    fleet = instances(loaded("d0", queued=1000), loaded("d1", queued=2000, cost=fast))
    assert choice("least_predicted_ttft", fleet, Work(100)) == "d1"
    assert choice("least_tokens", fleet, Work(100)) == "d0"


def test_least_predicted_ttft_subtracts_what_is_cached() -> None:
    fleet = instances(loaded("d0"), loaded("d1", queued=300))
    assert choice("least_predicted_ttft", fleet, Work(800)) == "d0"
    assert choice("least_predicted_ttft", fleet, Work(800, {ref("d1"): 48})) == "d1"


def test_a_decode_is_chosen_by_the_wait_for_its_room() -> None:
    full = loaded("d0", running=4, held=15000, free_blocks=2, residence_s=20.0)
    busy = loaded("d1", running=9, held=9000, free_blocks=400, residence_s=20.0)
    work = Work(800, phase="decode", max_tokens=64)
    assert choice("least_predicted_ttft", instances(full, busy), work) == "d1"


def test_whoever_has_told_no_step_times_counts_as_the_others() -> None:
    fleet = instances(loaded("d0", queued=500), loaded("d1", cost=StepCost()), loaded("d2", queued=500))
    assert choice("least_predicted_ttft", fleet, Work(100)) == "d1"


def test_prefix_aware_follows_the_prefix_until_the_queue_is_too_long() -> None:
    cached = {ref("d0"): 30}
    for queued, expected in ((0, "d0"), (1000, "d0"), (1300, "d1")):
        fleet = instances(loaded("d0", queued=queued), loaded("d1"))
        assert choice("prefix_aware", fleet, Work(500, cached)) == expected, queued


def test_one_shared_prefix_spreads_over_the_fleet() -> None:
    """40 requests at a time with one prefix, that only d0 has at first; whoever computes it, has it."""
    names = [f"d{n}" for n in range(4)]
    view, one = view_of(loaded(name) for name in names), policy("prefix_aware")
    cached, chosen, held = {ref("d0"): 30}, Counter[str](), []
    for _ in range(400):
        instance = one.choose(view.instances("decode"), Work(500, cached))
        view.note_assignment(instance.ref, 500, Work(500, cached).uncached_tokens(instance))
        chosen[instance.ref.instance] += 1
        held.append(instance.ref.instance)
        cached[instance.ref] = 30
        if len(held) > 40:
            running = Counter[str](held[-40:])
            for name in names:
                view.observe(loaded(name, running=running[name], held=500 * running[name]))
    assert max(chosen.values()) / (400 / 4) <= 1.3
    assert min(chosen.values()) >= 60


def test_nearest_prefers_the_pair_on_one_node_then_rack_then_zone() -> None:
    prefill = instances(loaded("p0", "prefill", zone="z", rack="r", node="n"))
    places = {
        "d-far": {"zone": "y", "rack": "r", "node": "n"},
        "d-zone": {"zone": "z", "rack": "q", "node": "m"},
        "d-rack": {"zone": "z", "rack": "r", "node": "m"},
        "d-node": {"zone": "z", "rack": "r", "node": "n"},
    }
    work = Work(2000, phase="decode", max_tokens=64, partners=prefill)
    left = list(places)
    while left:
        fleet = instances(*(loaded(name, **places[name]) for name in left))  # type: ignore[arg-type]
        assert choice("nearest", fleet, work) == left.pop()


def test_nearest_chooses_the_prefill_that_has_a_near_decode() -> None:
    decodes = instances(loaded("d0", zone="b"))
    fleet = instances(loaded("p0", "prefill", zone="a"), loaded("p1", "prefill", zone="b"))
    work = Work(2000, phase="prefill", partners=decodes)
    assert choice("nearest", fleet, work) == "p1"
    assert choice("least_predicted_ttft", fleet, work) == "p0"


def test_nearest_goes_farther_when_the_queue_there_costs_more_than_the_way() -> None:
    decodes = instances(loaded("d0", zone="a"))
    fleet = instances(loaded("p0", "prefill", zone="a", queued=5000), loaded("p1", "prefill", zone="b"))
    assert choice("nearest", fleet, Work(500, phase="prefill", partners=decodes)) == "p1"


def test_the_self_test_tells_what_a_node_carries_and_caps_the_rest() -> None:
    here = info("p0", "prefill", node="n", token_bytes=10_000, kv_gbps=8.0)
    assert transfer_s(here, info("d0", "decode", node="n", kv_gbps=6.0), 6000) == pytest.approx(
        0.01, rel=0.02
    )
    assert transfer_s(here, info("d1", "decode", node="m", kv_gbps=0.5), 6000) == pytest.approx(
        0.12, rel=0.02
    )
    unknown = transfer_s(replace(here, kv_gbps=0.0), info("d0", "decode", node="n"), 6000)
    assert unknown == pytest.approx(6e7 / (HOP_GBPS["node"] * 1e9), rel=0.02)


def test_equal_names_in_unequal_places_are_no_common_place() -> None:
    one = info("p0", "prefill", zone="z", rack="r", node="n")
    assert hop(one, info("d", "decode", zone="y", rack="r", node="n")) == "far"
    assert hop(one, info("d", "decode", zone="z", rack="q", node="n")) == "zone"
    assert hop(info("p", "prefill"), info("d", "decode")) == "zone"
    assert hop(info("p", "prefill", node="n"), info("d", "decode", node="n")) == "node"


def test_power_of_two_takes_the_less_loaded_and_leaves_the_most_loaded_alone() -> None:
    fleet = instances(*(loaded(f"d{n}", queued=100 * n) for n in range(5)))
    one = policy("power_of_two")
    chosen = Counter[str](one.choose(fleet, Work(100)).ref.instance for _ in range(1000))
    assert chosen["d4"] == 0
    assert chosen["d0"] > chosen["d1"] > chosen["d2"] > chosen["d3"] > 0
    assert chosen["d0"] == pytest.approx(400, abs=60)


def test_two_routers_with_one_old_view_do_not_run_over_the_same_instance() -> None:
    """Each sees only its own assignments; the least loaded of the old view must not get them all."""
    beats = [loaded(f"d{n}", queued=10 * n) for n in range(4)]
    chosen: Counter[str] = Counter()
    for seed in (1, 2):
        view, one = view_of(beats), policy("power_of_two", seed)
        for _ in range(100):
            instance = one.choose(view.instances("decode"), Work(100))
            view.note_assignment(instance.ref, 100)
            chosen[instance.ref.instance] += 1
    assert max(chosen.values()) / 50 <= 1.2
