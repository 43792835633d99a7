"""A trial: verdicts, what they say of goodput, and when it is not worth going on."""

from dataclasses import replace

import pytest

from bench.goodput.estimate import Point
from bench.goodput.slo import Objective, Slo
from bench.goodput.trial import Jury, Trial
from bench.records import RequestRecord

TIGHT, LOOSE = Slo("k12", 1.0, 0.012), Slo("k20", 1.0, 0.020)
GOOD = RequestRecord(
    due=0, sent=0.001, ended=1, ttft_s=0.5, tpot_s=0.010, itl_s=(0.01, 0.03), output_tokens=9
)
SLOW = replace(GOOD, tpot_s=0.015)
FAILED = RequestRecord(due=0, sent=0, ended=1, error="503: full")


def trial(good: int, slow: int, failed: int = 0, *, asked: int = 100) -> Trial:
    records = (GOOD,) * good + (SLOW,) * slow + (FAILED,) * failed
    return Trial("chunked", 3, 2.0, asked, records, 50.0)


def test_one_trial_judges_every_slo() -> None:
    found = trial(85, 10, 5)
    assert (found.met(TIGHT), found.met(LOOSE)) == (85, 95)
    assert found.verdict(Objective(TIGHT, 0.9)) is False
    assert found.verdict(Objective(LOOSE, 0.9)) is True
    assert found.verdict(Objective(LOOSE, 0.99)) is False
    assert found.errors == {"503: full": 5}


def test_a_trial_given_up_is_a_miss_for_sure_or_says_nothing() -> None:
    found = trial(20, 11)
    assert not found.complete
    tight, loose = Objective(TIGHT, 0.9), Objective(LOOSE, 0.9)
    assert found.verdict(tight) is False
    assert found.point(tight) == Point(2.0, 20, 31, missed_for_sure=True)
    assert found.verdict(loose) is None
    assert found.point(loose) is None


def test_percentiles_are_of_what_ended_well() -> None:
    found = trial(1, 1, 1, asked=3)
    assert found.percentile("ttft_s", 50) == 0.5
    assert found.percentile("tpot_s", 100) == 0.015
    assert found.percentile("itl_s", 100) == 0.03
    assert trial(0, 0, 1, asked=1).percentile("ttft_s", 50) is None


def test_a_late_client_is_noticed() -> None:
    on_time = trial(100, 0)
    assert not on_time.client_was_late
    assert on_time.lateness_s == pytest.approx(0.001)
    late = replace(on_time, records=(GOOD,) * 97 + (replace(GOOD, sent=0.05),) * 3)
    assert late.client_was_late
    assert late.lateness_s == pytest.approx(0.05)


def test_it_goes_on_while_one_open_objective_can_still_be_met() -> None:
    tight, loose = Objective(TIGHT, 0.9), Objective(LOOSE, 0.9)
    both, one = Jury([tight, loose], 100), Jury([tight], 100)
    for jury in (both, one):
        for _ in range(11):
            jury.ended(SLOW)
    assert not both.hopeless([])
    assert one.hopeless([])
    assert not Jury([], 100).hopeless([])


def test_patience_lets_more_of_them_miss() -> None:
    jury = Jury([Objective(TIGHT, 0.9)], 100, patience=2.0)
    for _ in range(20):
        jury.ended(SLOW)
    assert not jury.hopeless([])
    jury.ended(SLOW)
    assert jury.hopeless([])


def test_requests_under_way_that_cannot_make_it_any_more_count_as_missed() -> None:
    jury = Jury([Objective(TIGHT, 0.9)], 100)
    limit = 1.0 + 63 * 0.012
    assert jury.hopeless([(limit + 0.1, 64)] * 11)
    assert not jury.hopeless([(limit - 0.1, 64)] * 11)
    assert not jury.hopeless([(limit + 0.1, 64)] * 10)
