"""Structured output from the default model, through the official client and real processes.

Prefill samples the first token of every answer, decode the others.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from common.config import Topology
from common.engine.prepare_model import prepare
from common.model_files import DEFAULT_CACHE_DIR, DEFAULT_MODEL
from tests.support.real_cluster import MODEL, RealCluster, real_cluster
from tests.support.structured import SCHEMAS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(params=["disaggregated", "chunked"])
async def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[RealCluster]:
    topology: Topology = request.param
    directory = await asyncio.to_thread(prepare, DEFAULT_MODEL, DEFAULT_CACHE_DIR, lambda _line: None)
    async with real_cluster(directory, tmp_path, topology=topology) as cluster:
        yield cluster
        await cluster.idle()


async def test_what_is_asked_for_is_what_comes(cluster: RealCluster) -> None:
    async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
        await asyncio.gather(
            *(follows_schema(client, name) for name in SCHEMAS), free_text(client), other_constraints(client)
        )
        await streams_the_same(client)
        await refuses(client)


def asking(schema: dict[str, Any], **fields: Any) -> dict[str, Any]:
    wanted = {"name": "answer", "schema": schema, "strict": True}
    question = {"role": "user", "content": "Describe a person or a place as JSON."}
    return {
        "model": MODEL,
        "messages": [question],
        "max_tokens": 300,
        "response_format": {"type": "json_schema", "json_schema": wanted},
        **fields,
    }


async def follows_schema(client: openai.AsyncOpenAI, name: str) -> None:
    answer = await client.chat.completions.create(**asking(SCHEMAS[name], n=2, seed=1, temperature=0.8))
    for choice in answer.choices:
        jsonschema.validate(json.loads(choice.message.content or ""), SCHEMAS[name])
        assert choice.finish_reason == "stop"


async def free_text(client: openai.AsyncOpenAI) -> None:
    question = "What is the capital of France?"
    answer = await client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": question}], max_tokens=20, temperature=0
    )
    assert answer.choices[0].message.content == "The capital of France is Paris."


async def other_constraints(client: openai.AsyncOpenAI) -> None:
    async def complete(**extra: Any) -> str:
        answer = await client.completions.create(
            model=MODEL, prompt="Q: Is the sky blue, or not?\nA:", max_tokens=60, extra_body=extra
        )
        assert answer.choices[0].finish_reason == "stop"
        return answer.choices[0].text

    assert await complete(guided_choice=["yes", "no", "여하튼"]) in ("yes", "no", "여하튼")
    assert await complete(structured_outputs={"choice": ["only this"]}) == "only this"
    assert re.fullmatch("[0-9]{2}:[0-9]{2}", await complete(guided_regex="[0-9]{2}:[0-9]{2}"))
    only_token = await complete(structured_outputs={"regex": "a"}, logprobs=2)
    assert only_token == "a"


async def streams_the_same(client: openai.AsyncOpenAI) -> None:
    ask = asking(SCHEMAS["nested"], temperature=0)
    whole = (await client.chat.completions.create(**ask)).choices[0].message.content
    pieces, reasons = [], []
    async for chunk in await client.chat.completions.create(**ask, stream=True):
        pieces.append(chunk.choices[0].delta.content or "")
        reasons.append(chunk.choices[0].finish_reason)
    assert "".join(pieces) == whole
    assert [reason for reason in reasons if reason] == ["stop"]
    short = await client.chat.completions.create(**ask | {"max_tokens": 3})
    assert short.choices[0].finish_reason == "length"


async def refuses(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        await client.chat.completions.create(**asking({"type": "foo"}))
    assert refusal.value.param == "response_format.json_schema.schema"
    with pytest.raises(openai.BadRequestError) as refusal:
        await client.chat.completions.create(**asking({}) | {"response_format": {"type": "xml"}})
    assert refusal.value.param == "response_format.type"
