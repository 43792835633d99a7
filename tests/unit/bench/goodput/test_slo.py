"""SLO arithmetic: budgets from the unloaded measurement, and who kept to them."""

from dataclasses import replace

import pytest

from bench.goodput.slo import Objective, Slo, Unloaded
from bench.records import RequestRecord

SLO = Slo("k15", 1.0, 0.05)
GOOD = RequestRecord(due=0, sent=0, ended=2, ttft_s=1.0, tpot_s=0.05, output_tokens=9)


def test_budgets_are_six_times_ttft_and_k_times_the_step() -> None:
    slos = Unloaded(ttft_s=0.3, step_s=0.012).slos()
    assert [slo.name for slo in slos] == ["k20", "k15", "k12"]
    assert [slo.ttft_s for slo in slos] == pytest.approx([1.8] * 3)
    assert [slo.tpot_s for slo in slos] == pytest.approx([0.024, 0.018, 0.0144])


@pytest.mark.parametrize(
    ("record", "met"),
    [
        (GOOD, True),
        (replace(GOOD, ttft_s=1.001), False),
        (replace(GOOD, tpot_s=0.0501), False),
        (replace(GOOD, tpot_s=None), True),
        (replace(GOOD, ttft_s=None), False),
        (replace(GOOD, error="503"), False),
    ],
)
def test_both_budgets_must_be_kept_and_nothing_may_fail(record: RequestRecord, met: bool) -> None:
    assert SLO.met_by(record) is met


def test_scaling_scales_both() -> None:
    assert SLO.scaled(0.5) == Slo("k15", 0.5, 0.025)


def test_a_request_has_missed_when_its_last_token_is_later_than_both_budgets_allow() -> None:
    assert SLO.hopeless_after(64) == pytest.approx(1.0 + 63 * 0.05)
    assert SLO.hopeless_after(1) == pytest.approx(1.0)


def test_a_target_is_out_of_reach_after_its_last_miss() -> None:
    ninety, ninety_nine = Objective(SLO, 0.9), Objective(SLO, 0.99)
    assert (ninety.allows(10, 100), ninety.allows(11, 100)) == (True, False)
    assert (ninety_nine.allows(1, 100), ninety_nine.allows(2, 100)) == (True, False)
    assert (ninety.name, ninety_nine.name) == ("k15", "k15_99")
