"""Percentiles against numpy, the reference whose default definition they claim."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.stats import mean, percentile, percentile_figures

SAMPLES = st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=200)


@given(SAMPLES, st.floats(0, 100))
def test_any_percentile_is_numpys(samples: list[float], q: float) -> None:
    expected = float(np.percentile(np.array(samples), q))
    assert math.isclose(percentile(samples, q), expected, rel_tol=1e-9, abs_tol=1e-6)


@given(SAMPLES)
def test_a_percentile_lies_within_the_samples(samples: list[float]) -> None:
    assert all(min(samples) <= percentile(samples, q) <= max(samples) for q in (0, 1, 50, 99, 100))


@given(SAMPLES)
def test_the_mean_is_numpys(samples: list[float]) -> None:
    assert math.isclose(mean(samples), float(np.mean(samples)), rel_tol=1e-9, abs_tol=1e-6)


@pytest.mark.parametrize(("samples", "q"), [([], 50), ([1.0], -1), ([1.0], 101), ([1.0, math.nan], 50)])
def test_what_has_no_percentile_is_refused(samples: list[float], q: float) -> None:
    with pytest.raises(ValueError):
        percentile(samples, q)


def test_no_samples_have_no_mean() -> None:
    with pytest.raises(ValueError):
        mean([])


def test_figures_of_nothing_are_left_out() -> None:
    assert percentile_figures("ttft_ms", []) == {}
    assert percentile_figures("ttft_ms", [1.0, 2.0, 3.0], (50,)) == {"ttft_ms_p50": 2.0}
