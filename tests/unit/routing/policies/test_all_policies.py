"""What holds for every policy: one of the candidates, repeatable, fair to equals, and nobody starves."""

from collections import Counter
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.config import RoutingPolicyName
from common.messages.cluster import StepCost, WorkerBeat
from common.routing.policies import POLICIES, SEES_PREFIXES, Phase, Work
from tests.support.fleet import ref, worker_beat
from tests.support.routing import COST, instances, loaded, policy, view_of

EVERY = pytest.mark.parametrize("name", POLICIES)

costs = st.builds(StepCost, st.floats(0, 1), st.floats(0, 0.1), st.floats(0, 1e-4))
beats = st.builds(
    lambda queued, running, held, waiting, free, residence, cost, place: {
        "queued": queued,
        "running": running,
        "held": held,
        "waiting": waiting,
        "free_blocks": free,
        "residence_s": residence,
        "cost": cost,
        "zone": place[0],
        "rack": place[1],
        "node": place[2],
        "max_num_seqs": 8,
        "chunk_tokens": 64,
    },
    st.integers(0, 5000),
    st.integers(0, 20),
    st.integers(0, 9000),
    st.integers(0, 3000),
    st.integers(0, 1000),
    st.floats(0, 30),
    costs,
    st.tuples(*[st.sampled_from(["", "a", "b"])] * 3),
)
fleets = st.lists(beats, min_size=1, max_size=6)


def named(fleet: list[dict[str, object]], prefix: str = "d") -> list[WorkerBeat]:
    return [loaded(f"{prefix}{number}", **one) for number, one in enumerate(fleet)]  # type: ignore[arg-type]


def test_the_setting_and_the_policies_have_the_same_names() -> None:
    assert set(get_args(RoutingPolicyName)) == set(POLICIES)
    assert set(POLICIES) > SEES_PREFIXES


@EVERY
@settings(max_examples=60, deadline=None)
@given(
    fleets,
    fleets,
    st.integers(1, 3000),
    st.sampled_from(get_args(Phase)),
    st.dictionaries(st.integers(0, 5), st.integers(1, 200)),
    st.integers(0, 9),
)
def test_one_of_the_candidates_is_chosen_and_the_same_again(
    name: str,
    fleet: list[dict[str, object]],
    others: list[dict[str, object]],
    tokens: int,
    phase: Phase,
    cached: dict[int, int],
    seed: int,
) -> None:
    candidates, partners = instances(*named(fleet)), instances(*named(others, "p"))
    work = Work(tokens, {ref(f"d{n}"): blocks for n, blocks in cached.items()}, phase, 16, partners)
    first, again = (policy(name, seed).choose(candidates, work) for _ in range(2))
    assert first in candidates
    assert first is again


@EVERY
def test_equals_share_alike_one_at_a_time(name: str) -> None:
    """Each request is over before the next: the view shows an idle fleet of equals every time."""
    fleet = [worker_beat(f"d{n}") for n in range(4)]
    one, view = policy(name), view_of(fleet)
    chosen: Counter[str] = Counter()
    for _ in range(400):
        for beat in fleet:
            view.observe(beat)
        instance = one.choose(view.instances("decode"), Work(100))
        view.note_assignment(instance.ref, 100)
        chosen[instance.ref.instance] += 1
    if name == "power_of_two":
        assert max(chosen.values()) < 1.3 * min(chosen.values())
    else:
        assert set(chosen.values()) == {100}


@EVERY
def test_a_burst_between_two_beats_is_spread(name: str) -> None:
    fleet = [loaded(f"d{n}") for n in range(4)]
    one, view = policy(name), view_of(fleet)
    chosen: Counter[str] = Counter()
    for _ in range(100):
        instance = one.choose(view.instances("decode"), Work(100))
        view.note_assignment(instance.ref, 100)
        chosen[instance.ref.instance] += 1
    assert max(chosen.values()) <= 1.2 * 25


@pytest.mark.parametrize("name", sorted(set(POLICIES) - {"nearest"}))
def test_nobody_idle_starves_however_slow_it_looked(name: str) -> None:
    """An instance whose first step was terribly slow still gets something to show that it is not."""
    slow = StepCost(base_s=5.0, token_s=0.5)
    beats = [loaded("d0"), loaded("d1"), loaded("d2", cost=slow)]
    one, view = policy(name), view_of(beats)
    cached = {ref("d0"): 6, ref("d1"): 6}
    for _ in range(200):
        for beat in beats:
            view.observe(beat)
        instance = one.choose(view.instances("decode"), Work(100, cached))
        view.note_assignment(instance.ref, 100)
        if instance.ref == ref("d2"):
            return
    pytest.fail("d2 never got any")


def test_with_one_candidate_there_is_no_choice() -> None:
    for name in POLICIES:
        (only,) = instances(loaded("d0", queued=9000, cost=COST))
        assert policy(name).choose([only], Work(10)) is only
