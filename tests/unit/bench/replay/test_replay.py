"""The replay bench: the ideal by hand, a small trace through a whole cluster, and what it says of itself."""

from fractions import Fraction
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from bench.__main__ import main
from bench.benches import replay as bench
from bench.benches.replay import SAMPLE, figures
from bench.replay.ideal import ideal_hit_rate
from bench.replay.simulation import Replay, Replayer
from bench.traces import Trace, TraceRequest, read_trace
from bench.virtual.loop import run_virtual
from common.config import RoutingPolicyName


def trace(*blocks: tuple[int, ...], tokens: int = 0, gap_s: float = 5.0) -> Trace:
    """One request each, `gap_s` apart, of full blocks of 32 tokens and `tokens` more."""
    requests = (
        TraceRequest(gap_s * number, 32 * len(ids) + tokens, 4, (*ids, 1000 + number))
        for number, ids in enumerate(blocks)
    )
    return Trace(tuple(requests), 32)


def replayed(trace: Trace, policy: RoutingPolicyName, workers: int = 2) -> Replay:
    return run_virtual(Replayer(trace, policy, workers, 0, lambda _: None).run())


def test_the_ideal_counts_full_blocks_that_came_before() -> None:
    assert ideal_hit_rate(trace((1, 2), (1, 2, 3), (1, 3), tokens=4)) == pytest.approx(
        (64 + 32) / (68 + 100 + 68)
    )
    assert ideal_hit_rate(trace((1, 2), (1, 2))) == pytest.approx(32 / 128)  # the last token is computed
    assert ideal_hit_rate(Trace((TraceRequest(0, 100, 5), TraceRequest(1, 100, 5)))) == 0


def test_one_worker_finds_all_that_there_is() -> None:
    turns = trace((1, 2), (5, 6), (1, 2, 3), (5, 6, 7), (1, 2, 3, 4), tokens=4)
    done = replayed(turns, "round_robin", workers=1)
    assert done.hit_rate == pytest.approx(ideal_hit_rate(turns))
    assert done.requests == (5,)
    assert done.failures == ()
    assert len(done.ttft_s) == 5


def test_two_workers_find_it_if_they_are_asked_by_prefix() -> None:
    turns = trace(
        *((n, n + 1, *range(100 * n, 100 * n + k)) for k in (1, 2, 3) for n in (1, 11, 21)), tokens=4
    )
    aware, blind = replayed(turns, "prefix_aware"), replayed(turns, "round_robin")
    assert aware.hit_rate == pytest.approx(ideal_hit_rate(turns))
    assert blind.hit_rate < aware.hit_rate
    assert sum(aware.requests) == 9
    assert aware.max_over_mean <= 4 / 3


def test_the_sample_keeps_most_hits() -> None:
    whole = read_trace(SAMPLE)
    part = Trace(whole.requests[:150], whole.block_tokens).scaled(length=Fraction(1, 16))
    done = replayed(part, "prefix_aware", workers=4)
    assert done.hit_rate >= 0.9 * ideal_hit_rate(part)
    assert done.max_over_mean <= 1.3


def test_figures_are_the_first_policys_and_each_ones() -> None:
    one, other = Replay(0.3, (3, 1), (0.1, 0.2), ()), Replay(0.1, (2, 2), (0.4,), ())
    found = figures({"prefix_aware": one, "round_robin": other}, 0.4, 4)
    assert found["hit_rate"] == found["hit_rate_prefix_aware"] == 0.3
    assert found["hit_rate_over_ideal"] == pytest.approx(0.75)
    assert found["hit_rate_round_robin"] == 0.1
    assert found["max_over_mean"] == 1.5
    assert "hit_rate" not in figures({"prefix_aware": one}, 0.0, 4)


def run_bench(*arguments: str) -> tuple[int, str]:
    screen = StringIO()
    code = main(["replay", *arguments], Console(file=screen, width=200))
    return code, screen.getvalue()


def test_the_bench_runs_and_says_when_it_uses_the_sample(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(bench, "SHARED", tmp_path / "nothing.jsonl")
    code, said = run_bench("--requests", "20", "--policy", "prefix_aware,round_robin")
    assert code == 0
    assert "nothing.jsonl is not there: its first 400 requests, which come along, are replayed" in said
    assert "hit_rate_over_ideal_round_robin" in said


def test_azures_form_has_no_hits_and_is_balanced_all_the_same(tmp_path: Path) -> None:
    lines = [f"2023-11-16 18:17:{n:02d}.0000000,{100 + 50 * n},{16 + n}" for n in range(12)]
    path = tmp_path / "azure.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(lines) + "\n")
    code, said = run_bench("--trace", str(path), "--length", "1")
    assert code == 0
    assert "does not tell which prompts begin alike" in said
    assert "hit_rate" not in said


@pytest.mark.parametrize("wrong", [("--policy", "best"), ("--length", "0"), ("--workers", "0")])
def test_wrong_options_are_refused(wrong: tuple[str, str]) -> None:
    with pytest.raises(SystemExit):
        run_bench(*wrong)
