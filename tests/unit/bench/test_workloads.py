"""Workloads: the same for the same seed, with the lengths and gaps they promise."""

import random
from itertools import pairwise
from statistics import fmean, pstdev

import pytest

from bench.workloads import (
    TOKEN_IDS,
    fixed,
    gamma_arrivals,
    lognormal,
    mixed,
    poisson_arrivals,
    requests,
    text_of_words,
    uniform,
)


def test_the_same_seed_gives_the_same_requests_and_a_longer_run_starts_alike() -> None:
    short = requests(5, uniform(1, 50), uniform(1, 9), seed=7)
    assert short == requests(9, uniform(1, 50), uniform(1, 9), seed=7)[:5]
    assert short != requests(5, uniform(1, 50), uniform(1, 9), seed=8)


def test_prompts_have_the_length_asked_for() -> None:
    for spec in requests(20, fixed(33), fixed(4), seed=0):
        assert len(spec.prompt) == 33
        assert spec.max_tokens == 4
        assert all(TOKEN_IDS[0] <= token < TOKEN_IDS[1] for token in spec.prompt if isinstance(token, int))
    for spec in requests(3, fixed(33), fixed(4), seed=0, prompts=text_of_words):
        assert isinstance(spec.prompt, str)
        assert len(spec.prompt.split()) == 33


def test_uniform_lengths_include_both_ends() -> None:
    rng = random.Random(0)
    assert {uniform(2, 4)(rng) for _ in range(100)} == {2, 3, 4}


def test_lognormal_lengths_have_their_median_and_stay_within_bounds() -> None:
    rng = random.Random(0)
    drawn = sorted(lognormal(200, 1.0, 10, 1000)(rng) for _ in range(4001))
    assert drawn[0] >= 10
    assert drawn[-1] == 1000
    assert 180 <= drawn[2000] <= 220


def test_a_mixture_draws_by_weight() -> None:
    rng = random.Random(0)
    lengths = mixed((3, fixed(1)), (1, fixed(2)))
    ones = [lengths(rng) for _ in range(4000)].count(1)
    assert 2850 <= ones <= 3150


@pytest.mark.parametrize("cv", [0.5, 1.0, 3.0])
def test_gaps_have_the_rate_and_the_burstiness_asked_for(cv: float) -> None:
    times = gamma_arrivals(4.0, cv, 20_000, seed=1)
    gaps = [after - before for before, after in pairwise([0.0, *times])]
    assert min(gaps) >= 0
    assert fmean(gaps) == pytest.approx(0.25, rel=0.06)
    assert pstdev(gaps) / fmean(gaps) == pytest.approx(cv, rel=0.06)


def test_poisson_is_gamma_with_cv_1() -> None:
    assert poisson_arrivals(2.0, 5, seed=3) == gamma_arrivals(2.0, 1.0, 5, seed=3)


@pytest.mark.parametrize(("rate", "cv"), [(0.0, 1.0), (1.0, 0.0), (-1.0, 1.0)])
def test_impossible_arrivals_are_refused(rate: float, cv: float) -> None:
    with pytest.raises(ValueError):
        gamma_arrivals(rate, cv, 1, seed=0)
