"""Running streams and long prompts, in virtual time against a server that stalls when a prompt comes."""

import asyncio
from pathlib import Path

import pytest

from bench.client import open_client
from bench.interference import PROMPT_TOKENS, STREAMS, Gaps, gaps_of, listen, prompt_arrivals
from bench.plots import plot_survival
from bench.records import RequestRecord
from tests.support.virtual_loop import run_virtual
from tests.unit.bench.fake_server import FakeServer


def hear(server: FakeServer, seconds: float, *, prompts: bool) -> Gaps:
    async def main() -> Gaps:
        clock = asyncio.get_running_loop().time
        async with open_client("http://fake", transport=server.transport(), clock=clock) as client:
            return await listen(client, "x", seconds, prompts=prompts)

    return run_virtual(main())


def test_four_streams_run_all_the_time_and_long_prompts_come_every_three_seconds() -> None:
    server = FakeServer(first_s=0.25, gap_s=0.02, tokens=6000)
    gaps = hear(server, 10.0, prompts=True)
    long_ones = [body for body in server.bodies if isinstance(body["prompt"], list)]
    assert [len(body["prompt"]) for body in long_ones if isinstance(body["prompt"], list)] == [
        PROMPT_TOKENS
    ] * len(prompt_arrivals(10.0))
    assert len(server.bodies) == STREAMS + len(long_ones)
    assert gaps.p50 == pytest.approx(20)
    assert gaps.longest == pytest.approx(20)
    assert gaps.figures()["prompt_ttft_ms_p50_x"] == pytest.approx(250)
    assert len(gaps.itl_ms) == pytest.approx(STREAMS * (10.0 - 0.25) / 0.02, rel=0.01)


def test_without_prompts_only_the_streams_are_asked_for() -> None:
    server = FakeServer(tokens=6000)
    gaps = hear(server, 2.0, prompts=False)
    assert len(server.bodies) == STREAMS
    assert set(gaps.figures()) == {"itl_ms_p50_x", "itl_ms_p99_x", "itl_ms_max_x"}


def test_prompts_are_three_seconds_apart_and_answered_before_the_end() -> None:
    assert prompt_arrivals(12.0) == [2.0, 5.0, 8.0]


def test_a_failure_is_told_once_with_the_settings_name() -> None:
    failed = RequestRecord(due=0, sent=0, ended=1, error="500: no")
    good = RequestRecord(due=0, sent=0, ended=1, ttft_s=0.5, itl_s=(0.02, 0.5))
    gaps = gaps_of("decode_first_64", [good, failed], [failed])
    assert gaps.problems == ("decode_first_64: 500: no",)
    assert gaps.itl_ms == pytest.approx((20, 500))


def test_the_plot_is_a_png_of_some_size(tmp_path: Path) -> None:
    file = tmp_path / "gaps.png"
    plot_survival(file, {"a": [20.0, 21.0, 200.0], "b": [30.0]}, title="t", quantity="ms")
    content = file.read_bytes()
    assert content.startswith(b"\x89PNG")
    assert len(content) > 5000
