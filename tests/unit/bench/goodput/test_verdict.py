"""Plain words: who wins, what is level, what is not decided, and where splitting stops paying."""

import pytest

from bench.goodput.estimate import Estimate, Ratio
from bench.goodput.verdict import _word, format_estimate, format_ratio, sentences, turning_point
from tests.unit.bench.goodput.made_up import findings, trial, typical


def test_each_slo_has_its_sentence_and_each_pair_its_turning_point() -> None:
    lines = sentences(typical())
    assert len(lines) == 4
    assert lines[2].startswith("k12: disaggregated against colocated: **better**, 4.44 against 1.23")


def test_splitting_stops_paying_where_the_budget_is_loose_enough() -> None:
    found = findings(
        trial("colocated", 1, {11: 96, 18: 4}),
        trial("colocated", 2, {11: 50, 18: 50}),
        trial("colocated", 3, {11: 50, 40: 50}),
        trial("disaggregated", 1, {11: 100}),
        trial("disaggregated", 2, {11: 95, 40: 5}),
        trial("disaggregated", 3, {11: 50, 40: 50}),
    )
    turn = turning_point(found, "disaggregated", "colocated")
    assert turn == "stops paying at k = 1.80"


def test_what_cannot_be_compared_is_said() -> None:
    assert "nothing was measured" in str(turning_point(findings(), "disaggregated", "colocated"))
    assert "not measured" in sentences(findings())[0]


@pytest.mark.parametrize(
    ("found", "word"),
    [
        (Ratio(1.8, 1.5, 2.1), "better"),
        (Ratio(1.8, 0.9, 2.1), "level"),
        (Ratio(1.03, 1.01, 1.05), "level"),
        (Ratio(0.6, 0.5, 0.8), "worse"),
        (Ratio(1.8, 1.5, 2.1, ">="), "better"),
        (Ratio(1.8, 1.5, 2.1, "<="), "not decided"),
        (Ratio(0.4, 0.3, 0.5, ">="), "not decided"),
        (Ratio(0.4, 0.3, 0.5, "<="), "worse"),
        (Ratio(1.8, 1.5, 2.1, "?"), "not decided"),
    ],
)
def test_a_verdict_needs_the_interval_and_the_bound_to_agree(found: Ratio, word: str) -> None:
    assert _word(found).startswith(word)


def test_bounds_show_in_figures() -> None:
    assert format_estimate(Estimate(2.345)) == "2.35"
    assert format_estimate(Estimate(5.0, "<=")) == "≤ 5"
    assert format_estimate(None) == "-"
    assert format_ratio(Ratio(1.8, 1.5, 2.1, ">=")) == "≥ 1.80 (1.50 to 2.10)"
