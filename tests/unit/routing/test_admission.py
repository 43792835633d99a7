"""Early rejection: who is refused, when he should come back, and who never is."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.ids import AttemptKey, InstanceId, RequestId
from common.messages.cluster import StepCost, WorkerBeat
from common.messages.generation import SLO, Rejected, Route, RouteRequest
from common.routing.admission import TooLate, in_time
from common.routing.policies import Work
from common.routing.rules import RequestRouter, RoutingRules
from tests.support.fleet import ref
from tests.support.routing import instances, loaded, policy, view_of

COST = StepCost(base_s=0.0, token_s=0.001)
PREFILL = Work(300, phase="prefill")
DECODE = Work(300, phase="decode", max_tokens=101)


def prefill(name: str = "p0", queued: int = 0, cost: StepCost = COST) -> WorkerBeat:
    return loaded(name, "prefill", queued=queued, cost=cost)


def test_whoever_is_late_is_left_out_and_all_late_is_too_late() -> None:
    slow, fast = instances(prefill("p0", 900), prefill("p1", 100))
    assert in_time([slow, fast], PREFILL, SLO(ttft_s=0.5)) == [fast]
    assert in_time([slow, fast], PREFILL, SLO(ttft_s=1.3)) == [slow, fast]
    assert in_time([slow, fast], PREFILL, None) == [slow, fast]
    assert in_time([slow, fast], PREFILL, SLO(tpot_s=0.0001)) == [slow, fast]
    late = in_time([slow, fast], PREFILL, SLO(ttft_s=0.35))
    assert isinstance(late, TooLate)
    assert late.retry_after_s == pytest.approx(0.1)
    assert "400 ms, over the budget of 350 ms" in late.message


def test_retry_after_is_when_the_queue_is_short_enough() -> None:
    """The queue drains by a second each second; then the same question is answered with yes."""
    late = in_time(instances(prefill(queued=5000)), PREFILL, SLO(ttft_s=1.0))
    assert isinstance(late, TooLate)
    assert late.retry_after_s == pytest.approx(4.3)
    left = 5000 - int(late.retry_after_s * 1000)
    for queued, admitted in ((left + 10, False), (left, True)):
        assert (
            isinstance(in_time(instances(prefill(queued=queued)), PREFILL, SLO(ttft_s=1.0)), list) == admitted
        )


def test_what_would_be_late_anywhere_waits_for_an_idle_one_only() -> None:
    hopeless = SLO(ttft_s=0.1)
    assert len(in_time(instances(prefill()), PREFILL, hopeless)) == 1  # type: ignore[arg-type]
    late = in_time(instances(prefill(queued=700)), PREFILL, hopeless)
    assert isinstance(late, TooLate)
    assert late.retry_after_s == pytest.approx(0.7)


def test_a_decode_without_room_counts_the_wait_into_each_token() -> None:
    full = loaded("d0", running=10, held=16000, free_blocks=0, residence_s=40.0, cost=COST)
    late = in_time(instances(full), DECODE, SLO(tpot_s=0.012))
    assert isinstance(late, TooLate)
    assert "each later token" in late.message
    assert 0 < late.retry_after_s <= 40.0
    assert isinstance(in_time(instances(full), DECODE, SLO(ttft_s=0.0001, tpot_s=0.02)), list)
    assert isinstance(in_time(instances(full), replace(DECODE, max_tokens=1), SLO(tpot_s=0.001)), list)


def test_without_step_times_nobody_is_refused() -> None:
    assert isinstance(in_time(instances(prefill(queued=9000, cost=StepCost())), PREFILL, SLO(0.001)), list)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 5000), min_size=1, max_size=4),
    st.builds(StepCost, st.floats(0, 1), st.floats(0, 0.1), st.floats(0, 1e-4)),
    st.integers(1, 3000),
    st.floats(0.001, 5),
)
def test_an_idle_one_always_admits_and_more_load_never_does(
    queues: list[int], cost: StepCost, tokens: int, budget: float
) -> None:
    work, slo = Work(tokens, phase="prefill"), SLO(ttft_s=budget)
    fleet = instances(*(prefill(f"p{n}", queued, cost) for n, queued in enumerate(queues)))
    answer = in_time(fleet, work, slo)
    if 0 in queues:
        assert isinstance(answer, list)
    if isinstance(answer, TooLate):
        assert answer.retry_after_s > 0
        busier = instances(*(prefill(f"p{n}", queued + 100, cost) for n, queued in enumerate(queues)))
        assert isinstance(in_time(busier, work, slo), TooLate)


# --- in the router --------------------------------------------------------------------------------


def asked(slo: SLO | None, attempt: int = 1, choice: int = 0, max_tokens: int = 16) -> RouteRequest:
    return RouteRequest(
        AttemptKey(RequestId("r"), attempt, choice), InstanceId("g1"), 300, max_tokens, slo=slo
    )


def router(*beats: WorkerBeat, **rules: object) -> RequestRouter:
    return RequestRouter(view_of(beats), policy("least_tokens"), RoutingRules(**rules))  # type: ignore[arg-type]


BUSY = prefill(queued=5000)
FREE = loaded("d0", cost=COST)
TIGHT = SLO(ttft_s=1.0)


def test_a_late_request_gets_429_and_one_without_budget_waits() -> None:
    answer = router(BUSY, FREE).route(asked(TIGHT))
    assert isinstance(answer, Rejected)
    assert answer.reason == "overloaded"
    assert answer.retry_after_s == pytest.approx(4.3)
    assert router(BUSY, FREE).route(asked(None)) == Route(ref("p0"), ref("d0"))
    assert router(BUSY, FREE, slo_admission=False).route(asked(TIGHT)) == Route(ref("p0"), ref("d0"))


def test_what_has_started_is_never_refused() -> None:
    for attempt, choice, refused in ((1, 0, True), (2, 0, False), (3, 2, True), (4, 2, False)):
        answer = router(BUSY, FREE).route(asked(TIGHT, attempt, choice))
        assert isinstance(answer, Rejected) == refused, (attempt, choice)


def test_a_decode_that_does_it_all_must_keep_both_budgets() -> None:
    busy = loaded("d0", queued=2000, running=8, held=100, cost=COST)
    for slo, refused in (
        (SLO(1.0), True),
        (SLO(3.0), False),
        (SLO(None, 0.005), True),
        (SLO(3.0, 0.05), False),
    ):
        answer = router(busy, topology="chunked").route(asked(slo))
        assert isinstance(answer, Rejected) == refused, slo


def test_a_full_decode_refuses_before_the_prompt_is_computed() -> None:
    full = loaded("d0", running=10, held=16000, free_blocks=0, residence_s=60.0, cost=COST)
    answer = router(prefill(), full).route(asked(SLO(2.0, 0.05)))
    assert isinstance(answer, Rejected)
    assert router(prefill(), full).route(asked(SLO(2.0, 0.2))) == Route(ref("p0"), ref("d0"))


def test_a_burst_is_admitted_until_the_budget_is_full() -> None:
    """Assignments since the last beat count, so one old view does not let everybody in."""
    one = router(prefill(queued=100), FREE)
    answers = [one.route(asked(SLO(ttft_s=2.0))) for _ in range(20)]
    assert [isinstance(answer, Route) for answer in answers] == [True] * 6 + [False] * 14
