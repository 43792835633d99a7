"""The fitted step-time model: finds known constants, never goes below zero, follows changes."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.engine.runner import BatchPlan, PlanRow
from common.engine.step_times import StepTimes
from common.ids import SequenceId
from common.messages.cluster import StepCost
from common.messages.generation import SamplingParams

SAMPLING = SamplingParams(max_tokens=1, seed=0)


def plan(*spans: tuple[int, int]) -> BatchPlan:
    """A step that computes `count` tokens from `start` on, for each (start, count)."""
    rows = (
        PlanRow(SequenceId(n), (), start, count, start + count, (), False, 0, SAMPLING)
        for n, (start, count) in enumerate(spans)
    )
    return BatchPlan(1, tuple(rows))


def context(*spans: tuple[int, int]) -> int:
    """Token by token: each attends to itself and all before it."""
    return sum(position + 1 for start, count in spans for position in range(start, start + count))


def spans(rng: random.Random) -> list[tuple[int, int]]:
    """Some decodes and sometimes a chunk, as steps are."""
    decodes = [(rng.randint(20, 2000), 1) for _ in range(rng.randint(0, 16))]
    return (
        [*decodes, (rng.randint(0, 1000), rng.randint(1, 256))] if rng.random() < 0.4 else decodes or [(9, 1)]
    )


def seconds(cost: StepCost, *parts: tuple[int, int]) -> float:
    return cost.base_s + cost.token_s * sum(n for _, n in parts) + cost.context_s * context(*parts)


def test_known_constants_are_found() -> None:
    truth, rng, times = StepCost(0.02, 0.0005, 2e-8), random.Random(1), StepTimes()
    for _ in range(300):
        parts = spans(rng)
        times.observe(plan(*parts), seconds(truth, *parts))
    found = times.cost()
    for _ in range(50):
        parts = spans(rng)
        assert seconds(found, *parts) == pytest.approx(seconds(truth, *parts), rel=0.02)


def test_nothing_is_known_before_the_first_step_and_its_time_after_it() -> None:
    times = StepTimes()
    assert times.cost() == StepCost()
    times.observe(plan((0, 100)), 0.2)
    assert seconds(times.cost(), (0, 100)) == pytest.approx(0.2, rel=0.01)


def test_it_follows_an_engine_that_has_become_faster() -> None:
    rng, times = random.Random(2), StepTimes()
    for speed in (1.0, 0.25):
        truth = StepCost(0.04 * speed, 0.001 * speed, 0.0)
        for _ in range(300):
            parts = spans(rng)
            times.observe(plan(*parts), seconds(truth, *parts))
    assert seconds(times.cost(), (0, 200)) == pytest.approx(0.06, rel=0.05)


@given(
    st.lists(
        st.tuples(
            st.lists(st.tuples(st.integers(0, 4000), st.integers(1, 512)), min_size=1, max_size=8),
            st.floats(0, 10),
        ),
        min_size=1,
        max_size=30,
    )
)
def test_whatever_steps_take_no_coefficient_is_negative(
    steps: list[tuple[list[tuple[int, int]], float]],
) -> None:
    times = StepTimes()
    for parts, took in steps:
        times.observe(plan(*parts), took)
    assert min(vars_of(times.cost())) >= 0


def vars_of(cost: StepCost) -> tuple[float, float, float]:
    return cost.base_s, cost.token_s, cost.context_s
