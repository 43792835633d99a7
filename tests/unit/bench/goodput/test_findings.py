"""Findings: goodputs, ratios and figures of made-up trials, and what counts as a fault."""

from dataclasses import replace

import pytest

from bench.goodput.slo import TARGETS, Objective
from tests.unit.bench.goodput.made_up import ALONE, findings, trial, typical

K20, K15, K12 = ALONE.slos()


def test_one_set_of_requests_gives_the_goodput_of_every_k() -> None:
    found = typical()
    values = [found.goodput("colocated", Objective(slo, 0.9)) for slo in (K20, K15, K12)]
    assert [value.value for value in values if value] == pytest.approx(
        [2 + 2 * (10 / 30), 2.0, 1 + 6 / 26]  # 100 -> 70 %, exactly 90 %, 96 -> 70 %
    )


def test_figures_have_the_names_that_others_look_up() -> None:
    figures = typical().figures()
    assert figures["goodput_long_prompt_colocated_k12"] == pytest.approx(1 + 6 / 26)
    assert figures["goodput_long_prompt_disaggregated_k12"] == pytest.approx(4 + 4 * (5 / 45))
    ratio = figures["goodput_long_prompt_disaggregated_over_colocated_k12"]
    assert ratio == pytest.approx((4 + 20 / 45) / (1 + 6 / 26))
    low = figures["goodput_long_prompt_disaggregated_over_colocated_k12_low"]
    high = figures["goodput_long_prompt_disaggregated_over_colocated_k12_high"]
    assert low < ratio < high
    assert figures["goodput_long_prompt_colocated_over_disaggregated_k12"] == pytest.approx(1 / ratio)
    assert "goodput_long_prompt_colocated_k12_bound" not in figures
    assert figures["unloaded_ttft_ms"] == pytest.approx(100)
    assert {"goodput_long_prompt_colocated_k15", "goodput_long_prompt_colocated_k20_99"} <= figures.keys()


def test_a_bound_is_told_beside_its_figure() -> None:
    found = findings(trial("colocated", 0, {11: 50, 30: 50}), trial("disaggregated", 1, {11: 100}))
    figures = found.figures()
    assert figures["goodput_long_prompt_colocated_k12_bound"] == -1
    assert figures["goodput_long_prompt_disaggregated_k12_bound"] == 1
    assert figures["goodput_long_prompt_disaggregated_over_colocated_k12_bound"] == 1
    assert figures["goodput_long_prompt_disaggregated_over_colocated_k12"] == pytest.approx(2.0)


def test_the_fullest_trial_of_a_rate_counts() -> None:
    early = replace(trial("colocated", 1, {30: 15}))
    found = findings(early, trial("colocated", 1, {11: 100}))
    assert [len(one.records) for one in found.best_trials("colocated")] == [100]
    assert found.goodput("disaggregated", Objective(K12, TARGETS[0])) is None


def test_scales_are_compared_where_most_completed_a_rate() -> None:
    found = typical()
    assert found.common_rung() == 2
    assert found.at("disaggregated", 2) is not None
    assert findings().common_rung() is None


def test_being_late_or_full_is_no_fault_but_anything_else_is() -> None:
    late = ["given up: later than any budget allows"] * 3
    full = replace(trial("colocated", 0, {11: 99}).records[0], error="429: full", status=429, ttft_s=None)
    one = trial("colocated", 0, {11: 90}, late)
    one = replace(one, records=(*one.records, full))
    assert findings(one).problems() == ()
    broken = findings(one, trial("disaggregated", 0, {11: 98}, ["500: it broke"] * 2))
    assert broken.problems() == ("disaggregated: 500: it broke (2 times)",)


def test_engines_that_are_not_alike_are_a_fault() -> None:
    found = typical()
    found.modes = {"colocated": ("compiled", "eager"), "disaggregated": ("compiled", "compiled")}
    assert found.problems() == ("the workers run differently: compiled, eager",)
