"""The prefix bench: misses and hits in turn, and only real ones count."""

import pytest

from bench.benches import prefix
from bench.benches.prefix import OUTPUT_TOKENS, OWN_TOKENS, SHARED_TOKENS, rounds_of_prompts
from bench.records import RequestRecord


def record(ttft_s: float, cached: int | None = None, **changes: object) -> RequestRecord:
    plain = {"due": 0.0, "sent": 0.0, "ended": 9.0, "output_tokens": OUTPUT_TOKENS}
    return RequestRecord(**plain | {"ttft_s": ttft_s, "cached_tokens": cached} | changes)  # type: ignore[arg-type]


def test_a_round_shares_all_but_its_own_tokens_and_rounds_share_nothing() -> None:
    specs = rounds_of_prompts(3, seed=0)
    assert {len(spec.prompt) for spec in specs} == {SHARED_TOKENS + OWN_TOKENS}
    shared = [spec.prompt[:SHARED_TOKENS] for spec in specs]
    assert shared[::2] == shared[1::2]
    assert len({part[:16] for part in shared}) == 3
    assert len({spec.prompt for spec in specs}) == 6


def test_figures_are_medians_and_their_ratio() -> None:
    records = [
        record(2.0, 0),
        record(0.1, 1488),
        record(4.0, 0),
        record(0.3, 1472),
        record(3.0, 0),
        record(0.2, 1488),
    ]
    figures = prefix.figures(records)
    assert figures["ttft_miss_ms"] == pytest.approx(3000)
    assert figures["ttft_hit_ms"] == pytest.approx(200)
    assert figures["ttft_miss_over_hit"] == pytest.approx(15)
    assert figures["hit_cached_tokens"] == 1488
    assert prefix.problems(records) == []


@pytest.mark.parametrize(
    ("miss", "hit", "problem"),
    [
        (record(2.0, 1488), record(0.1, 1488), "miss 0: 1488 tokens were cached"),
        (record(2.0, 0), record(0.1, 0), "hit 0: 0 tokens were cached"),
        (record(2.0, 0), record(0.1, 1520), "hit 0: 1520 tokens were cached"),
        (record(2.0, 0, error="503: nobody"), record(0.1, 1488), "miss 0: 503: nobody"),
        (record(2.0, 0), record(0.1, 1488, output_tokens=3), "hit 0: 3 tokens came"),
    ],
)
def test_what_is_not_a_miss_and_a_hit_is_a_problem(
    miss: RequestRecord, hit: RequestRecord, problem: str
) -> None:
    assert prefix.problems([miss, hit]) == [problem]


def test_a_server_that_does_not_tell_what_was_cached_is_believed() -> None:
    records = [record(2.0), record(0.1)]
    assert prefix.problems(records) == []
    assert "hit_cached_tokens" not in prefix.figures(records)


def test_without_one_good_miss_and_hit_there_are_no_figures() -> None:
    assert prefix.figures([record(2.0, 0), record(0.1, 0, error="gone")]) == {}
