"""Which step saturates, from times as machines of several kinds give them."""

from collections.abc import Callable

import pytest

from common.engine.runner_fake import FakeModel, FakeRunner
from common.engine.saturation import LEAST, ROUNDS, measure_saturation, saturating_tokens


def step(fixed_ms: float, token_ms: float) -> Callable[[int], float]:
    """A step costs so much by itself and for each token."""
    return lambda tokens: (fixed_ms + token_ms * tokens) / 1e3


@pytest.mark.parametrize(
    ("fixed_ms", "token_ms", "expected"),
    [
        (0.0, 0.5, 128),  # 128 and 256 tokens at the same rate
        (8.0, 0.5, 256),  # 512 would be 3 % faster than 256, 256 is 6 % faster than 128
        (27.0, 0.3, 1024),
        (1.0, 0.0001, 2048),  # a GPU that nothing here fills
        (0.0, 20.0, 128),  # seconds for the smallest: no other one is tried
    ],
)
def test_doubling_ends_where_it_gains_no_more(fixed_ms: float, token_ms: float, expected: int) -> None:
    assert saturating_tokens(step(fixed_ms, token_ms), 2048) == expected


def test_measured_times_of_this_projects_machine() -> None:
    """SmolLM2-135M, one core with AVX-512 BF16: the rate falls from 128 on, by attention's share."""
    seconds = {128: 0.0610, 256: 0.1260, 512: 0.2584}
    assert saturating_tokens(seconds.__getitem__, 2048) == 128


def test_one_slow_step_among_several_does_not_count() -> None:
    calls: list[int] = []

    def noisy(tokens: int) -> float:
        calls.append(tokens)
        slow = 5.0 if len(calls) % ROUNDS == 1 else 1.0
        return step(0.0, 0.1)(tokens) * slow

    assert saturating_tokens(noisy, 2048) == 128
    assert calls == [128] * ROUNDS + [256] * ROUNDS


@pytest.mark.parametrize("limit", [1, 100, LEAST, 200])
def test_the_limit_is_kept(limit: int) -> None:
    assert saturating_tokens(step(100.0, 0.001), limit) == limit


def test_a_slow_step_is_not_repeated() -> None:
    calls: list[int] = []

    def slow(tokens: int) -> float:
        calls.append(tokens)
        return 3.0

    assert saturating_tokens(slow, 2048) == LEAST
    assert calls == [LEAST]


def test_it_runs_within_a_small_pool_and_context() -> None:
    runner = FakeRunner(FakeModel(max_model_len=300), 10)
    assert LEAST <= measure_saturation(runner, 2048) <= 160
