"""The Python client's helpers, and bodies as other clients and frameworks write them."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from common.engine.grammar import GrammarCompiler
from tests.support.http_stage import Stage, make_vocabulary, open_stage

HI: list[Any] = [{"role": "user", "content": "Hi"}]
PARIS = '{"city": "Paris", "zip": null}'


class Place(BaseModel):
    city: str
    zip: int | None


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    """One that takes structured output; what its workers say is what a test has told them."""
    vocabulary = make_vocabulary(tmp_path)
    grammars = GrammarCompiler(tmp_path, vocabulary.tokenizer.vocab_size, sorted(vocabulary.eos_ids))
    async with open_stage(vocabulary, grammars=grammars) as opened:
        yield opened


@pytest.fixture
async def ai(stage: Stage) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{stage.url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def test_models(ai: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in ai.models.list()] == ["tiny"]
    assert (await ai.models.retrieve("tiny")).id == "tiny"
    with pytest.raises(openai.NotFoundError):
        await ai.models.retrieve("other")


async def test_raw_and_streaming_responses(ai: openai.AsyncOpenAI) -> None:
    raw = await ai.chat.completions.with_raw_response.create(model="tiny", messages=HI)
    assert raw.parse().choices[0].message.content == "Hello there."
    assert raw.request_id == raw.headers["x-request-id"]
    mine = {"X-Request-Id": "mine"}
    whole = await ai.chat.completions.create(model="tiny", messages=HI, extra_headers=mine)
    assert whole._request_id == "mine"
    streaming = ai.chat.completions.with_streaming_response
    async with streaming.create(model="tiny", messages=HI, stream=True) as response:
        lines = [line async for line in response.iter_lines()]
    assert [line for line in lines if line][-1] == "data: [DONE]"
    with pytest.raises(openai.BadRequestError) as refusal:
        await ai.chat.completions.create(model="tiny", messages=HI, temperature=3)
    assert (refusal.value.request_id, refusal.value.param) == (
        refusal.value.response.headers["x-request-id"],
        "temperature",
    )


async def test_answers_are_parsed_into_models(stage: Stage, ai: openai.AsyncOpenAI) -> None:
    stage.script.text = PARIS
    expected = Place(city="Paris", zip=None)
    chat = await ai.chat.completions.parse(model="tiny", messages=HI, response_format=Place)
    assert chat.choices[0].message.parsed == expected
    response = await ai.responses.parse(model="tiny", input="Hi", text_format=Place)
    assert response.output_parsed == expected
    async with ai.chat.completions.stream(model="tiny", messages=HI, response_format=Place) as chunks:
        kinds = {event.type async for event in chunks}
        assert kinds == {"chunk", "content.delta", "content.done"}
        assert (await chunks.get_final_completion()).choices[0].message.parsed == expected
    async with ai.responses.stream(model="tiny", input="Hi", text_format=Place) as events:
        assert [event.type async for event in events][-1] == "response.completed"
        assert (await events.get_final_response()).output_parsed == expected
    assert ["city" in job.sampling.grammar for job in stage.script.jobs] == [True] * 4


async def test_the_stream_helper_gathers_choices_log_probabilities_and_usage(ai: openai.AsyncOpenAI) -> None:
    async with ai.chat.completions.stream(
        model="tiny",
        messages=HI,
        n=2,
        logprobs=True,
        top_logprobs=2,
        stream_options={"include_usage": True},
    ) as chunks:
        kinds = {event.type async for event in chunks}
        final = await chunks.get_final_completion()
    assert {"logprobs.content.delta", "logprobs.content.done"} < kinds
    assert final.usage is not None
    assert final.usage.completion_tokens == 2 * 13
    for choice in final.choices:
        assert choice.message.content == "Hello there."
        assert choice.logprobs is not None
        assert "".join(one.token for one in choice.logprobs.content or ()) == "Hello there."


async def test_what_was_answered_can_be_sent_back_whole(stage: Stage, ai: openai.AsyncOpenAI) -> None:
    chat = await ai.chat.completions.create(model="tiny", messages=HI)
    history = [*HI, chat.choices[0].message.model_dump(), *HI]
    await ai.chat.completions.create(model="tiny", messages=history)
    response = await ai.responses.create(model="tiny", input="Hi")
    again: Any = [*HI, *(item.model_dump() for item in response.output), *HI]
    await ai.responses.create(model="tiny", input=again)
    spell = stage.made.gateway.vocabulary.tokenizer.spell
    first, second = spell(stage.script.jobs[1].prompt_ids), spell(stage.script.jobs[3].prompt_ids)
    assert first == second
    assert first.count("<|start|>assistant\nHello there.<|end|>") == 1


ABSENT = (
    *("n", "stop", "seed", "temperature", "top_p", "max_tokens", "stream", "stream_options", "user", "tools"),
    *("tool_choice", "logit_bias", "logprobs", "top_logprobs", "response_format", "parallel_tool_calls"),
    *(
        "metadata",
        "store",
        "reasoning_effort",
        "service_tier",
        "modalities",
        "audio",
        "prediction",
        "verbosity",
    ),
    *("web_search_options", "prompt_cache_key", "safety_identifier", "frequency_penalty", "presence_penalty"),
)
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "every field null": ("chat/completions", {"messages": HI} | dict.fromkeys(ABSENT)),
    "a framework's chat": (
        "chat/completions",
        {"messages": HI, "max_completion_tokens": 5, "n": 1, "seed": 3, "stop": ["x"], "stream": False}
        | {"logprobs": True, "top_logprobs": 2, "temperature": 0.5},
    ),
    "a harness's chat": (
        "chat/completions",
        {"messages": [{"role": "user", "content": "Hi", "type": "text"}], "temperature": 0, "max_tokens": 5}
        | {"stop": ["<|end|>"], "seed": 1234},
    ),
    "a developer and parts": (
        "chat/completions",
        {
            "messages": [
                {"role": "developer", "content": [{"type": "text", "text": "Be kind."}], "name": "app"},
                {"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": None}]},
            ],
            "reasoning_effort": "none",
            "store": False,
            "tools": [],
            "tool_choice": "auto",
        },
    ),
    "a harness's scores": (
        "completions",
        {
            "prompt": [[100, 101, 102]],
            "max_tokens": 1,
            "logprobs": 1,
            "echo": True,
            "temperature": 0,
            "seed": 1,
        },
    ),
    "a framework's completion": (
        "completions",
        {"prompt": ["Hi"], "logprobs": None, "max_tokens": 5, "n": 1, "temperature": 0.7, "top_p": 1}
        | {"frequency_penalty": 0, "presence_penalty": 0, "seed": None},
    ),
    "a load generator": (
        "completions",
        {"prompt": "Hi", "max_tokens": 5, "ignore_eos": True, "repetition_penalty": 1.0, "temperature": 0.0}
        | {"logprobs": None},
    ),
    "an agent": (
        "responses",
        {"input": HI, "instructions": "Be kind.", "tools": [], "include": ["reasoning.encrypted_content"]}
        | {"store": False, "reasoning": {"effort": None, "summary": None}, "text": {"verbosity": None}},
    ),
    "an agent's history": (
        "responses",
        {
            "input": [
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
                {
                    "type": "message",
                    "role": "assistant",
                    "id": "msg_1",
                    "content": [{"type": "output_text", "text": "Hello.", "annotations": []}],
                },
                {"role": "user", "content": "And?"},
            ],
            "reasoning": {},
            "text": {"format": {"type": "text"}},
        },
    ),
}


@pytest.mark.parametrize("name", BODIES)
async def test_bodies_of_other_clients(stage: Stage, name: str) -> None:
    path, body = BODIES[name]
    status, answer = await stage.post(f"/v1/{path}", {"model": "tiny"} | body)
    assert status == 200, answer
