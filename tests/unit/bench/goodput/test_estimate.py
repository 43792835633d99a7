"""Goodput from points, and the bootstrap against what statistics says of shares."""

import math

import pytest

from bench.goodput.estimate import Estimate, Point, goodput, ratio, resampled, share_interval
from bench.stats import percentile


def points(*found: tuple[float, int, int]) -> list[Point]:
    return [Point(rate, met, sent) for rate, met, sent in found]


def test_goodput_lies_on_the_line_between_the_rates_around_the_target() -> None:
    found = goodput(points((1.0, 100, 100), (3.0, 50, 100), (2.0, 95, 100)), 0.9)
    assert found == Estimate(pytest.approx(2.0 + 5 / 45), "")  # type: ignore[arg-type]


def test_a_rate_exactly_on_the_target_counts_as_met() -> None:
    assert goodput(points((1.0, 90, 100), (2.0, 50, 100)), 0.9).value == pytest.approx(1.0)


def test_beyond_the_measured_rates_only_a_bound_is_known() -> None:
    assert goodput(points((1.0, 99, 100), (2.0, 95, 100)), 0.9) == Estimate(2.0, ">=")
    assert goodput(points((1.0, 80, 100), (2.0, 10, 100)), 0.9) == Estimate(1.0, "<=")


def test_the_lowest_miss_ends_it_whatever_luck_brought_above() -> None:
    assert goodput(points((1.0, 100, 100), (2.0, 80, 100), (3.0, 100, 100)), 0.9).value == pytest.approx(1.5)


def test_a_trial_given_up_is_a_miss_even_if_its_share_looks_well() -> None:
    found = goodput([Point(1.0, 100, 100), Point(2.0, 19, 20, missed_for_sure=True)], 0.9)
    assert found == Estimate(2.0, "")


def test_nothing_measured_has_no_goodput() -> None:
    with pytest.raises(ValueError, match="without"):
        goodput([], 0.9)


def test_an_attainments_interval_is_as_wide_as_a_shares_is() -> None:
    low, high = share_interval(80, 100, seed="x")
    assert (high - low) / 2 == pytest.approx(1.645 * math.sqrt(0.8 * 0.2 / 100), rel=0.12)
    assert share_interval(100, 100, seed="x") == (1.0, 1.0)


def test_the_interval_of_a_goodput_narrows_with_the_root_of_the_requests() -> None:
    def width(sent: int) -> float:
        drawn = resampled(points((1.0, sent, sent), (2.0, sent // 2, sent)), 0.9, seed="x")
        return percentile(drawn, 95) - percentile(drawn, 5)

    assert width(100) / width(1600) == pytest.approx(4.0, rel=0.25)


def test_resamples_are_centred_and_the_same_for_the_same_seed() -> None:
    measured = points((1.0, 98, 100), (2.0, 60, 100))
    drawn = resampled(measured, 0.9, seed="x")
    assert percentile(drawn, 50) == pytest.approx(goodput(measured, 0.9).value, abs=0.05)
    assert drawn == resampled(measured, 0.9, seed="x")
    assert drawn != resampled(measured, 0.9, seed="y")


def test_a_ratio_has_its_interval_beside_it() -> None:
    found = ratio(Estimate(3.0), Estimate(1.5), [3.0, 3.3, 2.7] * 20, [1.5, 1.5, 1.5] * 20)
    assert (found.value, found.bound) == (2.0, "")
    assert (found.low, found.high) == pytest.approx((1.8, 2.2))


@pytest.mark.parametrize(
    ("one", "other", "bound"),
    [
        ("", "", ""),
        (">=", "", ">="),
        ("", "<=", ">="),
        (">=", "<=", ">="),
        (">=", ">=", "?"),
        ("<=", "", "<="),
    ],
)
def test_bounds_of_either_are_bounds_of_the_ratio(one: str, other: str, bound: str) -> None:
    assert ratio(Estimate(1.0, one), Estimate(1.0, other), [1.0], [1.0]).bound == bound
