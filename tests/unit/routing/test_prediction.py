"""Predictions against hand-made arithmetic, and that more load never promises less time."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.messages.cluster import StepCost
from common.routing.cluster_view import Instance
from common.routing.policies import Work
from common.routing.prediction import NOMINAL, Forecast, unloaded
from tests.support.fleet import ref
from tests.support.routing import instances, loaded

COST = StepCost(base_s=0.02, token_s=0.001, context_s=0.0)


def one(**load: object) -> Instance:
    (instance,) = instances(loaded("d0", **{"cost": COST, **load}))  # type: ignore[arg-type]
    return instance


def ttft(instance: Instance, work: Work) -> float:
    return Forecast([instance]).ttft_s(instance, work)


def tpot(instance: Instance, work: Work) -> float:
    return Forecast([instance]).tpot_s(instance, work)


def test_an_idle_prefill_takes_one_step_and_its_tokens() -> None:
    assert ttft(one(), Work(300, phase="prefill")) == pytest.approx(0.02 + 0.3)
    assert ttft(one(step_tokens=100), Work(300, phase="prefill")) == pytest.approx(0.06 + 0.3)


def test_the_queue_comes_before_and_the_cached_is_left_out() -> None:
    work = Work(300, {ref("d0"): 10}, "prefill")
    assert ttft(one(queued=500), work) == pytest.approx(0.02 + 0.5 + 0.14)


def test_chunks_carry_those_who_decode() -> None:
    busy = one(running=10, held=4000, chunk_tokens=100, cost=replace(COST, context_s=1e-6))
    steps, context = 3, 3 * 4000 + 300 * 150
    assert ttft(busy, Work(300)) == pytest.approx(steps * (0.02 + 0.01) + 0.3 + 1e-6 * context)


def test_attention_counts_the_context() -> None:
    quadratic = one(cost=StepCost(context_s=1e-6))
    assert ttft(quadratic, Work(1000, phase="prefill")) == pytest.approx(0.5)
    assert ttft(quadratic, Work(1000, {ref("d0"): 50}, "prefill")) == pytest.approx(1e-6 * 200 * 900)


def test_a_decode_with_room_takes_a_step_a_token_and_one_without_waits_its_share() -> None:
    work = Work(320, phase="decode", max_tokens=33)
    free = one(running=7, held=7000, free_blocks=500)
    assert tpot(free, work) == pytest.approx(0.02 + 8 * 0.001)
    full = one(running=7, held=15000, free_blocks=0, residence_s=10.0)
    assert tpot(full, work) == pytest.approx(0.028 + 10 * (320 / 16000) / 32)
    crowded = one(running=8, held=7000, free_blocks=500, residence_s=10.0, max_num_seqs=8)
    assert tpot(crowded, work) == pytest.approx(0.028 + 10 * (1 / 8) / 32)


def test_assignments_since_the_beat_count() -> None:
    work = Work(300, phase="prefill")
    since = replace(one(), assigned_tokens=400, assigned_to_compute=250, assigned_requests=1)
    assert ttft(since, work) == pytest.approx(0.02 + 0.25 + 0.3)


def test_the_untold_are_as_the_others_or_nominal() -> None:
    known, unknown = instances(loaded("d0", cost=COST), loaded("d1", cost=StepCost()))
    work = Work(300, phase="prefill")
    assert Forecast([known, unknown]).ttft_s(unknown, work) == pytest.approx(0.32)
    assert Forecast([unknown]).ttft_s(unknown, work) == NOMINAL.base_s + 300 * NOMINAL.token_s


amounts = st.tuples(
    st.integers(0, 5000),  # queued
    st.integers(0, 64),  # running
    st.integers(0, 20_000),  # held
    st.integers(0, 5000),  # waiting
    st.integers(0, 1000),  # blocks taken
)


@settings(max_examples=200, deadline=None)
@given(
    amounts,
    amounts,
    st.builds(StepCost, st.floats(0, 1), st.floats(0, 0.1), st.floats(0, 1e-4)),
    st.integers(1, 2000),
    st.integers(0, 2000),
    st.sampled_from(["prefill", "decode", "both"]),
    st.integers(0, 300),
    st.integers(0, 100),
)
def test_predictions_rise_with_load(
    load: tuple[int, ...],
    more: tuple[int, ...],
    cost: StepCost,
    tokens: int,
    max_tokens: int,
    phase: str,
    chunk: int,
    cached: int,
) -> None:
    def at(amounts: tuple[int, ...]) -> Instance:
        queued, running, held, waiting, taken = amounts
        return one(
            queued=queued,
            running=running,
            held=held,
            waiting=waiting,
            free_blocks=1000 - min(taken, 1000),
            residence_s=7.0,
            cost=cost,
            chunk_tokens=chunk,
            step_tokens=512,
            max_num_seqs=32,
        )

    work = Work(tokens, {ref("d0"): cached}, phase, max_tokens + 1)  # type: ignore[arg-type]
    light, heavy = at(load), at(tuple(a + b for a, b in zip(load, more, strict=True)))
    slack = 1e-9
    assert ttft(light, work) <= ttft(heavy, work) + slack
    assert tpot(light, work) <= tpot(heavy, work) + slack
    assert ttft(unloaded(heavy), work) <= ttft(light, work) + slack
    assert tpot(unloaded(heavy), work) <= tpot(light, work) + slack
