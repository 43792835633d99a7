"""The routing bench without a cluster: its prompts, its processes, and what it makes of counters."""

import pytest

from bench.benches.routing import OUTPUT_TOKENS, OWN_TOKENS, SHARED_TOKENS, _plan, prompts
from bench.records import RequestRecord
from bench.routing.shares import Shares, figures, problems, shares_of
from bench.scrape import Change, Snapshot
from deploy.local.spec import ClusterSpec

COUNTERS = """\
galley_requests_total{{instance="d",role="decode",status="ok"}} {ok}
galley_prefix_cache_query_tokens_total{{instance="d",role="decode"}} {asked}
galley_prefix_cache_hit_tokens_total{{instance="d",role="decode"}} {found}
"""


def change(ok: int, asked: int, found: int) -> Change:
    """From what a cluster had counted before to so much more."""
    before = COUNTERS.format(ok=5, asked=100, found=10)
    return Change(
        Snapshot([before]), Snapshot([COUNTERS.format(ok=5 + ok, asked=100 + asked, found=10 + found)])
    )


def record(ttft_s: float = 0.1, tokens: int = OUTPUT_TOKENS, error: str = "") -> RequestRecord:
    return RequestRecord(0, 0, 1, ttft_s=ttft_s, output_tokens=tokens, error=error)


def test_prompts_share_their_beginning_and_nothing_more() -> None:
    specs = prompts(20, "a")
    beginnings = {spec.prompt[:SHARED_TOKENS] for spec in specs}
    endings = {spec.prompt[SHARED_TOKENS:] for spec in specs}
    assert len(beginnings) == 1
    assert len(endings) == 20
    assert {len(ending) for ending in endings} == {OWN_TOKENS}
    assert prompts(20, "a") == specs
    assert prompts(1, "b")[0].prompt[:16] != specs[0].prompt[:16]


def test_shares_count_only_what_happened_in_between() -> None:
    shares = shares_of([change(6, 600, 300), change(2, 200, 100), change(0, 0, 0)], [record(), record(0.3)])
    assert shares.requests == (6, 2, 0)
    assert shares.hit_share == pytest.approx(0.5)
    assert shares.max_over_mean == pytest.approx(6 / (8 / 3))
    assert shares.starved == 1
    assert shares.ttft_s == (0.1, 0.3)


def test_figures_are_the_first_policys_and_each_ones() -> None:
    one, other = Shares((3, 1), 0.9, (0.1,)), Shares((2, 2), 0.5, (0.2,))
    found = figures({"prefix_aware": one, "round_robin": other}, Shares((1, 1), 0.0, ()))
    assert found["max_over_mean"] == found["max_over_mean_prefix_aware"] == 1.5
    assert found["max_over_mean_round_robin"] == 1.0
    assert found["starved_workers"] == 0
    assert found["max_over_mean_two_routers"] == 1.0


def test_failed_and_short_answers_are_told() -> None:
    lines = problems("x", [record(), record(error="503"), record(tokens=3)], OUTPUT_TOKENS)
    assert lines == ["x: request 1: 503", "x: request 2: 3 tokens came"]


def test_a_second_router_is_a_router_of_its_own() -> None:
    processes = _plan(ClusterSpec(decode=4, topology="chunked", port=0, router_port=0), routers=2)
    assert [process.name for process in processes[:2]] == ["router-0", "router-1"]
    assert processes[1].argv[-1] == "--instance=router-1"
    assert processes[-1].role == "gateway"
    assert len(processes) == 7
