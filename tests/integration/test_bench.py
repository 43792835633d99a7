"""`python -m bench smoke --url` against a small server over real HTTP: what it counts and when it fails."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import orjson
from aiohttp import web
from aiohttp.test_utils import TestServer

from bench.benches.smoke import REQUESTS
from common.observability.metrics import WorkerMetrics

KV_BYTES = 1000


class SmallGalley:
    """Gateway, router and one decode worker in one server; request number `failing` is refused."""

    def __init__(self, failing: int | None = None) -> None:
        self.worker = WorkerMetrics("decode-0", "decode")
        self.failing = failing
        self.requests = 0

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/instances", self._instances)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/v1/completions", self._completions)
        return app

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "small", "max_model_len": 2048}]})

    async def _instances(self, request: web.Request) -> web.Response:
        here = str(request.url.origin())
        instances = [{"role": role, "http_url": here, "state": "alive"} for role in ("gateway", "decode")]
        return web.json_response({"instances": instances})

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self.worker.exposition())

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        number, self.requests = self.requests, self.requests + 1
        if number == self.failing:
            return web.json_response({"error": {"message": "no decode instance"}}, status=503)
        count = (await request.json())["max_tokens"]
        self.worker.kv_transfer_bytes("sm").inc(KV_BYTES)
        self.worker.kv_transfer_seconds.observe(0.003)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for index in range(count):
            finish = "length" if index == count - 1 else None
            await _send(response, {"choices": [{"index": 0, "text": "\u2028", "finish_reason": finish}]})
        await _send(response, {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": count}})
        await response.write(b"data: [DONE]\n\n")
        return response


async def _send(response: web.StreamResponse, event: object) -> None:
    await response.write(b"data: " + orjson.dumps(event) + b"\n\n")


@asynccontextmanager
async def serving(galley: SmallGalley) -> AsyncIterator[str]:
    async with TestServer(galley.app()) as server:
        yield str(server.make_url("")).rstrip("/")


async def bench(*argv: str) -> tuple[int, str]:
    """Exit code and output of `python -m bench ...`."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench", *argv, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode()


async def test_smoke_counts_what_was_served_after_the_warm_up(tmp_path: Path) -> None:
    file = tmp_path / "smoke.json"
    async with serving(SmallGalley()) as url:
        code, output = await bench("smoke", "--url", url, "--router", url, "--json", str(file))
    assert code == 0, output
    figures = orjson.loads(file.read_bytes())["figures"]
    assert (figures["ok"], figures["failed"]) == (REQUESTS, 0)
    assert figures["transfer_bytes"] == REQUESTS * KV_BYTES
    assert 2 <= figures["transfer_ms_p50"] <= 5
    assert 0 < figures["ttft_ms_p50"] <= figures["ttft_ms_p99"]
    assert 0 <= figures["tpot_ms_p50"] <= figures["tpot_ms_p99"]


async def test_smoke_without_a_router_leaves_the_transfer_figures_out(tmp_path: Path) -> None:
    file = tmp_path / "smoke.json"
    async with serving(SmallGalley()) as url:
        code, output = await bench("smoke", "--url", url, "--router", f"{url}/nothing", "--json", str(file))
    assert code == 0, output
    assert orjson.loads(file.read_bytes())["figures"].keys() == {
        "ttft_ms_p50", "ttft_ms_p99", "tpot_ms_p50", "tpot_ms_p99", "ok", "failed"
    }  # fmt: skip


async def test_smoke_fails_when_a_request_failed(tmp_path: Path) -> None:
    file = tmp_path / "smoke.json"
    async with serving(SmallGalley(failing=7)) as url:
        code, output = await bench("smoke", "--url", url, "--router", url, "--json", str(file))
    assert code == 1
    assert "no decode instance" in output
    figures = orjson.loads(file.read_bytes())["figures"]
    assert (figures["ok"], figures["failed"]) == (REQUESTS - 1, 1)


async def test_nobody_there_is_one_line_and_a_failure() -> None:
    url = "http://127.0.0.1:9"  # the discard port: nobody listens
    code, output = await bench("smoke", "--url", url)
    assert code == 1
    assert output.startswith(f"smoke: {url}/v1/models names no model")
    assert output.count("\n") == 1
