"""The goodput bench end to end: real clusters whose workers echo at a steady pace, and servers by URL."""

import asyncio
import json
import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import orjson
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from rich.console import Console

from bench.frame import Frame
from bench.goodput import fleet
from bench.goodput.campaign import compare
from bench.goodput.comparison import Comparison
from bench.goodput.contestants import AGAINST, Contestant, Instances
from bench.goodput.effort import QUICK
from bench.goodput.load import Endpoint, OpenLoop
from bench.goodput.report import DATA, RATES_PLOT, SCALES_PLOT, write_report
from bench.goodput.slo import Slo
from bench.goodput.trial import Jury
from bench.goodput.workload import Load, Shape, Workload, unit_gaps
from bench.workloads import RequestSpec, gamma_arrivals, token_ids
from deploy.local.spec import ClusterSpec, ProcessSpec, plan_processes
from tests.support.tiny_models import make_tokenizer

STEP_MS = 10
IDS = (40, 96)
"""Letters: no token is half a character."""
HASTE = replace(QUICK, step=2.0, requests=30, sweep=False, minutes=1.0)


def load(count: int, seed: int) -> Load:
    shapes = tuple(
        Shape(16, 20, lambda nonce: token_ids(random.Random(nonce), 16, IDS)) for _ in range(count)
    )
    return Load(shapes, unit_gaps(gamma_arrivals(1.0, 1.0, count, seed=seed)))


TALK = Workload("small-talk", "16 in, 20 out", load, IDS)


def echoing(spec: ClusterSpec) -> list[ProcessSpec]:
    """The processes of `spec`; decode workers echo, and eight sequences are all that one takes at a time."""
    fleet = ("--workers=1", f"--step-ms={STEP_MS}", "--max-num-seqs=8")
    return [
        replace(plan, module="bench.fake.worker", argv=(*plan.argv, *fleet))
        if plan.role == "decode"
        else plan
        for plan in plan_processes(spec)
    ]


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, str]:
    make_tokenizer().save_pretrained(tmp_path)
    config = {"model_type": "llama", "max_position_embeddings": 8192, "eos_token_id": 2, "vocab_size": 320}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return {"model": str(tmp_path), "served_model_name": "tiny"}


async def test_two_workers_have_more_goodput_than_one(
    settings: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "THAW_S", 0.3)
    contestants = [
        Contestant(name, ClusterSpec(decode=decode, topology="chunked", settings=settings))
        for name, decode in (("one", 1), ("two", 2))
    ]
    cores = tuple(sorted(os.sched_getaffinity(0)))
    slos = (Slo("k20", 0.15, 0.1), Slo("k12", 0.15, 0.0005))
    comparison = Comparison(TALK, contestants, Instances(1, 1, cores), HASTE, fixed=slos, plan=echoing)
    console = Console(width=140)
    with console.capture() as captured:
        findings = await compare(comparison, Frame(console))
    figures = findings.figures()
    assert findings.problems() == ()
    assert figures["goodput_small_talk_two_over_one_k20"] > 1.2, captured.get()
    assert figures["goodput_small_talk_one_k12_bound"] == -1  # half a millisecond a token is beyond anybody
    assert 5 < figures["unloaded_step_ms"] < 60
    assert {trial.rate for trial in findings.trials["one"]} & {trial.rate for trial in findings.trials["two"]}
    assert "given up after" in captured.get()

    report = write_report(tmp_path / "report", comparison, findings, "Poisson arrivals").read_text()
    assert "two over one" in report
    for name in (RATES_PLOT, SCALES_PLOT):
        assert (tmp_path / "report" / name).read_bytes().startswith(b"\x89PNG")
    data = orjson.loads((tmp_path / "report" / DATA).read_bytes())
    assert all(trial["requests"] for trial in data["trials"])


class SlowServer:
    """Refuses request number 3, answers the others after half a second, whatever else it does meanwhile."""

    def __init__(self) -> None:
        self.requests = 0

    async def complete(self, request: web.Request) -> web.StreamResponse:
        number, self.requests = self.requests, self.requests + 1
        if number == 3:
            return web.json_response({"error": {"message": "full"}}, status=429)
        await asyncio.sleep(0.5)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        for finish in (None, "length"):
            await response.write(event({"choices": [{"index": 0, "text": "a", "finish_reason": finish}]}))
        usage = {"prompt_tokens": 2, "completion_tokens": 2}
        await response.write(event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n")
        return response


def event(body: object) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"


@asynccontextmanager
async def serving(server: SlowServer) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/v1/completions", server.complete)
    async with TestServer(app) as http:
        yield str(http.make_url("")).rstrip("/")


async def test_arrivals_never_wait_for_answers_and_take_turns_between_servers() -> None:
    one, other = SlowServer(), SlowServer()
    async with serving(one) as first, serving(other) as second:
        endpoints = [Endpoint(first, "m"), Endpoint(second, "m")]
        specs = [RequestSpec((1, 2), 2)] * 12
        loop = OpenLoop(endpoints, specs, Jury([], 12), lambda _: 10.0)
        records = await loop.run([0.02 * number for number in range(12)])
    assert (one.requests, other.requests) == (6, 6)
    assert [record.due for record in records] == pytest.approx([0.02 * number for number in range(12)])
    assert max(record.sent for record in records) < 0.5  # all before the first answer
    assert [record.error for record in records if record.error] == ["429: full"] * 2
    assert all(record.ttft_s >= 0.5 for record in records if record.ttft_s is not None)


async def test_a_load_ends_early_when_nothing_can_be_met_any_more() -> None:
    class GivesUp(Jury):
        def hopeless(self, running: object) -> bool:
            return server.requests >= 3

    server = SlowServer()
    async with serving(server) as url:
        loop = OpenLoop([Endpoint(url, "m")], [RequestSpec((1, 2), 2)] * 100, GivesUp([], 100), lambda _: 9.0)
        records = await loop.run([0.05 * number for number in range(100)])
    assert 3 <= len(records) <= 5
    assert all(record.output_tokens == 2 for record in records if record.ok)


async def test_who_takes_too_long_is_cut_off_and_nobody_there_is_an_error() -> None:
    async with serving(SlowServer()) as url:
        loop = OpenLoop([Endpoint(url, "m")], [RequestSpec((1, 2), 2)], Jury([], 1), lambda _: 0.1)
        [record] = await loop.run([0.0])
    assert record.error.startswith("given up")
    assert record.ended < 0.5
    loop = OpenLoop([Endpoint("http://127.0.0.1:9", "m")], [RequestSpec((1,), 2)], Jury([], 1), lambda _: 1.0)
    [record] = await loop.run([0.0])
    assert record.error.startswith("ConnectionRefusedError")


def test_servers_of_others_are_a_contestant_without_processes() -> None:
    assert not Contestant(AGAINST, urls=("http://h:1",)).split
