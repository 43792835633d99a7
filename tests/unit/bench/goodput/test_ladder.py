"""The search on made-up attainment curves: it finds the rung where each objective is lost, in few trials."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.goodput.ladder import Ladder, LadderSearch
from bench.goodput.slo import Objective, Slo

LADDER = Ladder(base=1.0, step=1.25, lowest=-20, highest=20)
OBJECTIVES = [Objective(Slo(f"k{k}", 1.0, k / 1000), 0.9) for k in (20, 15, 12)]


def explore(
    search: LadderSearch, met: Callable[[Objective, int], bool | None], limit: int = 100
) -> list[int]:
    tried: list[int] = []
    while (rung := search.next_rung()) is not None:
        assert rung not in tried
        assert len(tried) < limit
        tried.append(rung)
        search.record(rung, {objective: met(objective, rung) for objective in OBJECTIVES})
    return tried


def falling(limits: dict[str, int]) -> Callable[[Objective, int], bool]:
    """Attainment that reaches the target up to a rung and misses it above."""
    return lambda objective, rung: rung <= limits[objective.slo.name]


limits = st.lists(st.integers(-19, 19), min_size=3, max_size=3).map(lambda found: sorted(found, reverse=True))


@given(limits, st.integers(-20, 20))
def test_every_objective_is_bracketed_by_neighbouring_rungs(found: list[int], first: int) -> None:
    edges = dict(zip(("k20", "k15", "k12"), found, strict=True))
    search = LadderSearch(LADDER, OBJECTIVES, first)
    explore(search, falling(edges))
    for objective, bracket in search.brackets.items():
        assert (bracket.low, bracket.high) == (edges[objective.slo.name], edges[objective.slo.name] + 1)


def test_trials_are_shared_and_few() -> None:
    search = LadderSearch(LADDER, OBJECTIVES, 6)
    tried = explore(search, falling({"k20": 3, "k15": 2, "k12": -1}))
    assert tried == [6, 4, 2, 0, -2, 3, -1]


def test_brackets_come_before_their_refinement_and_high_rungs_before_low_ones() -> None:
    search = LadderSearch(LADDER, OBJECTIVES, 0)
    search.record(0, dict.fromkeys(OBJECTIVES, True))
    assert search.next_rung() == 2
    search.record(2, {OBJECTIVES[0]: True, OBJECTIVES[1]: False, OBJECTIVES[2]: False})
    assert search.next_rung() == 4
    search.record(4, dict.fromkeys(OBJECTIVES, False))
    assert search.next_rung() == 3  # nothing is without bounds any more


def test_what_never_fails_and_what_always_does_end_at_the_ladders_ends() -> None:
    short = Ladder(1.0, 1.25, lowest=-3, highest=3)
    for answer, last in ((True, 3), (False, -3)):
        search = LadderSearch(short, OBJECTIVES, 0)
        tried = explore(search, lambda _, __, answer=answer: answer)  # type: ignore[misc]
        assert tried[-1] == last
        ends = [(bracket.low, bracket.high) for bracket in search.brackets.values()]
        assert ends == [(last, None) if answer else (None, last)] * 3


def test_a_miss_below_counts_more_than_luck_above() -> None:
    search = LadderSearch(LADDER, OBJECTIVES[:1], 4)
    search.record(4, {OBJECTIVES[0]: True})
    search.record(2, {OBJECTIVES[0]: False})
    search.record(1, {OBJECTIVES[0]: True})
    bracket = search.brackets[OBJECTIVES[0]]
    assert (bracket.low, bracket.high) == (1, 2)
    assert search.next_rung() is None


def test_a_trial_given_up_tells_only_of_those_whose_target_is_lost() -> None:
    search = LadderSearch(LADDER, OBJECTIVES, 0)
    search.record(0, {OBJECTIVES[0]: None, OBJECTIVES[1]: False, OBJECTIVES[2]: False})
    assert search.open_at(0) == [OBJECTIVES[0]]
    assert search.open_at(-1) == OBJECTIVES
    search.record(-2, dict.fromkeys(OBJECTIVES, True))
    assert search.open_at(-2) == []


def test_rungs_are_evenly_spaced_in_log_space() -> None:
    assert LADDER.rate(3) / LADDER.rate(2) == pytest.approx(1.25)
    assert LADDER.rate(0) == 1.0
