"""A prefill is SIGKILLed while a decode has pulled two of its blocks: real processes, real UCX, real NATS."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import orjson
import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from bench.scrape import scrape
from deploy.local.cluster import LocalCluster
from deploy.local.processes import ChildProcess
from deploy.local.spec import ClusterSpec, plan_processes
from tests.support.tiny_models import make_tiny_model, make_tokenizer

PROMPT = [3 + i * 7 % 250 for i in range(150)]
NUM_OUTPUT = 24
BODY = {"model": "tiny", "prompt": PROMPT, "max_tokens": NUM_OUTPUT, "temperature": 0, "ignore_eos": True}
ERROR_WITHIN_S = 3.0
FREE_WITHIN_S = 2.0


class Silent:
    def changed(self, child: ChildProcess) -> None:
        """Nobody watches."""


@dataclass(frozen=True, slots=True)
class Gated:
    """A cluster whose prefill-0 holds its third block; `held` is set when it does."""

    cluster: LocalCluster
    http: httpx.AsyncClient
    held: asyncio.Event

    def child(self, name: str) -> ChildProcess:
        return next(child for child in self.cluster.children if child.name == name)

    async def ask(self) -> httpx.Response:
        body = {
            "model": "tiny",
            "prompt": PROMPT,
            "max_tokens": NUM_OUTPUT,
            "temperature": 0,
            "ignore_eos": True,
        }
        return await self.http.post("/v1/completions", json=body)

    async def ask_until_held(self) -> "asyncio.Task[httpx.Response]":
        """A request whose KV is held now. Those that another prefill got are answered and asked again."""
        held = asyncio.ensure_future(self.held.wait())
        while True:
            request = asyncio.create_task(self.ask())
            await asyncio.wait([held, request], return_when=asyncio.FIRST_COMPLETED, timeout=30)
            if self.held.is_set():
                return request
            assert request.done()
            assert request.result().status_code == 200

    def kill_prefill(self) -> None:
        os.kill(self.child("prefill-0").pid, signal.SIGKILL)

    async def wait_until_decode_is_empty(self) -> None:
        """The pool of decode-0 holds nothing for anybody; the cache does not count."""
        async with asyncio.timeout(FREE_WITHIN_S):
            while True:
                snapshot = await scrape([self.child("decode-0").address])
                assert snapshot is not None
                if not snapshot.total("galley_kv_blocks", state="used"):
                    assert not snapshot.total("galley_requests_in_flight")
                    assert not snapshot.total("galley_kv_blocks_quarantined")
                    return
                await asyncio.sleep(0.05)


@asynccontextmanager
async def gated_cluster(tmp_path: Path, prefill: int) -> AsyncIterator[Gated]:
    model = make_tiny_model("llama", tmp_path / "tiny")
    fifo = tmp_path / "gate"
    os.mkfifo(fifo)
    settings = {
        "model": str(model),
        "dtype": "float32",
        "num_blocks": "128",
        "cluster": f"gate-{os.getpid()}",
    }
    spec = ClusterSpec(port=0, router_port=0, prefill=prefill, decode=1, settings=settings)
    plans = [
        replace(plan, module="tests.support.gated_prefill", argv=(f"--gate={fifo}", *plan.argv))
        if plan.name == "prefill-0"
        else plan
        for plan in plan_processes(spec)
    ]
    loop, held = asyncio.get_running_loop(), asyncio.Event()
    gate = os.open(fifo, os.O_RDWR | os.O_NONBLOCK)
    loop.add_reader(gate, held.set)
    try:
        async with (
            LocalCluster(spec, tmp_path / "run", Silent(), plans=plans) as cluster,
            httpx.AsyncClient(base_url=cluster.url, timeout=60) as http,
        ):
            yield Gated(cluster, http, held)
    finally:
        loop.remove_reader(gate)
        os.close(gate)


async def test_another_prefill_completes_the_answer(tmp_path: Path) -> None:
    async with gated_cluster(tmp_path, prefill=2) as gated:
        request = await gated.ask_until_held()
        gated.kill_prefill()
        answer = (await asyncio.wait_for(request, 20)).json()
        golden = (await gated.ask()).json()
        assert answer["usage"]["completion_tokens"] == NUM_OUTPUT
        assert (
            answer["choices"][0]["text"] == golden["choices"][0]["text"] == expected_text(tmp_path / "tiny")
        )
        await gated.wait_until_decode_is_empty()


@pytest.mark.parametrize("stream", [False, True])
async def test_without_another_prefill_the_client_hears_soon(tmp_path: Path, stream: bool) -> None:
    async with gated_cluster(tmp_path, prefill=1) as gated:
        if stream:
            await one_that_streams(gated)
        else:
            request = await gated.ask_until_held()
            gated.kill_prefill()
            answer = await asyncio.wait_for(request, ERROR_WITHIN_S)
            assert answer.status_code == 503
            assert answer.json()["error"]["message"]
            assert "retry-after" in answer.headers
        await gated.wait_until_decode_is_empty()


async def one_that_streams(gated: Gated) -> None:
    async with gated.http.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as response:
        await asyncio.wait_for(gated.held.wait(), 30)
        gated.kill_prefill()
        async with asyncio.timeout(ERROR_WITHIN_S):
            lines = [line async for line in response.aiter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    error = orjson.loads(lines[-2].removeprefix("data: "))["error"]
    assert error["message"]
    assert error["code"]


def expected_text(model: Path) -> str:
    """What transformers' own generate says, in float32."""
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    config = GenerationConfig(max_new_tokens=NUM_OUTPUT, do_sample=False, pad_token_id=0)
    ids = torch.tensor([PROMPT])
    output = reference.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    return str(make_tokenizer().decode(output[0, len(PROMPT) :], skip_special_tokens=True))
