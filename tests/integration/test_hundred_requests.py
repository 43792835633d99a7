"""A disaggregated cluster of real processes under OpenAI's own client: all is answered, nothing is kept."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import openai
import pytest
import pytest_asyncio

from bench.scrape import Change
from tests.support.real_cluster import MODEL, RealCluster, at_a_time, real_cluster, settled
from tests.support.tiny_models import CONTEXT, make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

NUM_REQUESTS = 100
CONCURRENT = 16
LONG = CONTEXT - 100


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RealCluster]:
    """Sixteen of the longer requests here do not fit the pools at once."""
    directory = make_tiny_model("llama", tmp_path_factory.mktemp("llama"))
    async with real_cluster(directory, tmp_path_factory.mktemp("run"), num_blocks="160") as cluster:
        yield cluster


@pytest_asyncio.fixture(loop_scope="module")
async def client(cluster: RealCluster) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def ask(client: openai.AsyncOpenAI, number: int) -> tuple[str, str, int]:
    """Text, finish reason and completion tokens of question `number`; every second one is streamed.

    Two neighbours are the same question.
    """
    question = f"What is {number // 2}? " + "Please explain. " * (number // 2 % 20)
    fields: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 20 + number // 2 % 30,
        "temperature": 0,
    }
    create = client.chat.completions.create
    if number % 2 == 0:
        answer = await create(**fields)
        choice = answer.choices[0]
        assert answer.usage
        return choice.message.content or "", choice.finish_reason, answer.usage.completion_tokens
    text, finish, tokens = "", "", 0
    async for chunk in await create(stream=True, stream_options={"include_usage": True}, **fields):
        for part in chunk.choices:
            text += part.delta.content or ""
            finish = part.finish_reason or finish
        tokens = chunk.usage.completion_tokens if chunk.usage else tokens
    return text, finish, tokens


async def test_a_hundred_requests_are_answered_and_leave_nothing(
    cluster: RealCluster, client: openai.AsyncOpenAI
) -> None:
    before = await cluster.metrics("gateway")
    calls = [partial(ask, client, number) for number in range(NUM_REQUESTS)]
    answers = await at_a_time(CONCURRENT, calls)
    await cluster.idle()
    assert len(answers) == NUM_REQUESTS
    for whole, streamed in zip(answers[::2], answers[1::2], strict=True):
        text, finish, tokens = whole
        assert text
        assert finish in ("stop", "length")
        assert tokens > 0
        assert streamed == whole
    seen = Change(before, await cluster.metrics("gateway"))
    assert seen.total("galley_requests_total", status="ok") == NUM_REQUESTS
    assert seen.total("galley_requests_total", status="error") == 0


async def test_a_seed_decides_the_text(cluster: RealCluster) -> None:
    async def text(seed: int) -> str:
        body = await cluster.complete("Once upon a time", max_tokens=40, temperature=1, seed=seed)
        return str(body["choices"][0]["text"])

    first = await text(7)
    assert await text(7) == first
    assert await text(8) != first


async def test_clients_that_leave_a_stream_free_everything(
    cluster: RealCluster, client: openai.AsyncOpenAI
) -> None:
    async def leave() -> None:
        stream = await client.completions.create(
            model=MODEL, prompt="Tell me all.", max_tokens=LONG, stream=True, extra_body={"ignore_eos": True}
        )
        async for _ in stream:
            break
        await stream.close()

    async with left_by_all(cluster):
        await at_a_time(CONCURRENT, [leave] * CONCURRENT)


async def test_clients_that_leave_before_their_answer_free_everything(cluster: RealCluster) -> None:
    async def missing() -> dict[str, float]:
        seen = await cluster.metrics("gateway")
        unheard_of = CONCURRENT - seen.total("galley_requests_in_flight")
        return {"unheard of": unheard_of} if unheard_of or not seen.total("galley_requests_decoding") else {}

    async with left_by_all(cluster):
        ask = partial(cluster.complete, "Tell me all.", max_tokens=LONG, ignore_eos=True)
        asks = [asyncio.create_task(ask()) for _ in range(CONCURRENT)]
        await settled(missing, within_s=10)
        for one in asks:
            one.cancel()
        await asyncio.wait(asks)


@asynccontextmanager
async def left_by_all(cluster: RealCluster) -> AsyncIterator[None]:
    """CONCURRENT requests are made inside and none is heard to its end; all that they held is freed."""
    before = await cluster.metrics("gateway", "decode")
    yield
    await cluster.idle()
    seen = Change(before, await cluster.metrics("gateway", "decode"))
    assert seen.total("galley_requests_total", status="ok", role="gateway") == 0
    assert seen.total("galley_requests_aborted_total", reason="client", role="gateway") == CONCURRENT
    assert seen.total("galley_generated_tokens_total", role="decode") < CONCURRENT * LONG / 2
