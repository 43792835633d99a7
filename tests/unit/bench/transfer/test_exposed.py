"""The load of `bench transfer` against a server that answers as told, and its figures."""

import asyncio

import httpx
import orjson
import pytest

from bench.transfer import exposed
from bench.transfer.exposed import Exposed, measure, open_asker
from tests.support.virtual_loop import run_virtual


class Server:
    """Prompts of `n` tokens wait n / 100 ms for their KV; the long runners take an hour, or `runs_s`."""

    def __init__(self, runs_s: float = 3600.0) -> None:
        self.runs_s = runs_s
        self.running = 0
        self.most_beside = 0
        self.measured: list[int] = []

    async def answer(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "small"}]})
        assert request.headers["X-Galley-Timing"] == "1"
        body = orjson.loads(request.content)
        length = len(body["prompt"])
        if body["max_tokens"] == exposed.RUNNING_TOKENS:
            self.running += 1
            try:
                await asyncio.sleep(self.runs_s)
            finally:
                self.running -= 1
        elif length > exposed.RUNNING_PROMPT:
            self.most_beside = max(self.most_beside, self.running)
            self.measured.append(length)
        return httpx.Response(200, json={"galley": {"tpot_ms": 12.0, "transfer_ms": length / 100}})


def run(server: Server) -> Exposed:
    async def scenario() -> Exposed:
        async with open_asker("http://x", transport=httpx.MockTransport(server.answer)) as asker:
            return await measure(asker, (512, 2048), lambda _: None)

    return run_virtual(scenario())


def test_each_prompt_waits_beside_eight_that_run_on() -> None:
    server = Server()
    figures = run(server).figures()
    assert server.most_beside == exposed.RUNNING == 8
    assert server.running == 0
    assert server.measured == [512, 2048] * (exposed.WARM_UP_ROUNDS + exposed.ROUNDS)
    assert figures["step_ms_b8"] == 12.0
    assert figures["exposed_ms_512"] == 5.12
    assert figures["exposed_over_step_2048"] == pytest.approx(20.48 / 12)


def test_the_first_rounds_do_not_count() -> None:
    assert len(run(Server()).transfer_ms[512]) == exposed.ROUNDS


def test_runners_that_end_too_soon_spoil_the_measurement() -> None:
    with pytest.raises(RuntimeError, match="run on"):
        run(Server(runs_s=0.5))
