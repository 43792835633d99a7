"""Bodies of requests: what is taken, what is refused, and which field an error names."""

from typing import Any

import orjson
import pytest

from common.errors import InvalidRequest
from services.gateway.openai.base import parse_body, parse_object
from services.gateway.openai.chat import MAX_MESSAGES, ChatRequest
from services.gateway.openai.completions import CompletionRequest
from services.gateway.openai.responses import MAX_ITEMS, ResponsesRequest

VOCAB = 300
CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
COMPLETION = {"model": "m", "prompt": "x"}


def chat(**fields: Any) -> ChatRequest:
    ask = parse_body(orjson.dumps(CHAT | fields), ChatRequest)
    ask.check(VOCAB)
    return ask


def completion(**fields: Any) -> CompletionRequest:
    ask = parse_body(orjson.dumps(COMPLETION | fields), CompletionRequest)
    ask.check(VOCAB)
    return ask


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[]",
        b'"x"',
        b'{"a": NaN}',
        b"[" * 10_000,
        b'{"a": 1, "a": 2}',
        b'{"a": "\\ud800"}',
        b"\x1f\x8b",
        b"",
    ],
)
def test_what_is_no_json_object(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        parse_object(body)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 2}, "top_p"),
        ({"min_p": 1.5}, "min_p"),
        ({"top_k": -2}, "top_k"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"seed": "a"}, "seed"),
        ({"frequency_penalty": 9}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": "x"}}, "stream_options.include_usage"),
        ({"stop": list("abcde")}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": [1, 2]}, "stop"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"300": 1}}, "logit_bias"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"top_logprobs": 99, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"store": True}, "store"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"verbosity": "low"}, "verbosity"),
        ({"prompt_cache_retention": "24h"}, "prompt_cache_retention"),
        ({"wibble": 1}, "wibble"),
        ({"model": None}, "model"),
    ],
)
def test_a_bad_chat_field_is_named(change: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(**change)
    assert caught.value.param == param
    assert caught.value.message


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": ["x", 5]}, "prompt"),
        ({"prompt": [1, "x"]}, "prompt"),
        ({"prompt": [1, True]}, "prompt"),
        ({"prompt": [300]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": ["x"] * 129}, "prompt"),
        ({"prompt": ["x"] * 65, "n": 2}, "n"),
        ({"logprobs": 100}, "logprobs"),
        ({"best_of": 2}, "best_of"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"echo": "yes"}, "echo"),
        ({"suffix": "end"}, "suffix"),
    ],
)
def test_a_bad_completion_field_is_named(change: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        completion(**change)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("one", ("one",)),
        (["one", "two"], ("one", "two")),
        ([1, 2], ((1, 2),)),
        ([[1], [2, 3]], ((1,), (2, 3))),
        (["one", [2]], ("one", (2,))),
    ],
)
def test_the_forms_of_a_prompt(prompt: object, prompts: object) -> None:
    assert completion(prompt=prompt).prompt == prompts


def test_null_is_absent_and_asking_for_nothing_may_pass() -> None:
    ask = chat(
        max_tokens=None,
        stop=None,
        tools=[],
        tool_choice="none",
        store=False,
        service_tier="auto",
        parallel_tool_calls=False,
        modalities=["text"],
        response_format={"type": "text"},
        logit_bias={},
        user="me",
        reasoning_effort="none",
        verbosity="medium",
        prompt_cache_retention="in_memory",
    )
    sampling = ask.sampling(50, lambda: 4)
    assert (sampling.max_tokens, sampling.seed, sampling.temperature, sampling.top_p) == (50, 4, 1.0, 1.0)
    assert sampling.logprobs is None


def test_null_is_absent_at_every_level() -> None:
    part = {"type": "text", "text": "a", "annotations": None}
    message = {"role": "user", "content": [part], "name": None, "reasoning_content": None, "type": "text"}
    wanted = {"name": None, "schema": {"default": None}, "strict": None, "description": None, "other": None}
    ask = chat(
        messages=[message, {"role": "assistant", "content": None, "audio": None, "tool_calls": None}],
        response_format={"type": "json_schema", "json_schema": wanted, "schema": None},
    )
    assert [one.for_template()["content"] for one in ask.messages] == ["a", ""]
    assert ask.response_format is not None
    assert ask.response_format.json_schema is not None
    assert ask.response_format.json_schema.definition == {"default": None}  # a schema's own null is one


def test_everything_reaches_the_sampler() -> None:
    ask = chat(
        max_tokens=7, max_completion_tokens=5, min_tokens=2, ignore_eos=True, seed=-1, temperature=0,
        top_p=0.5, top_k=-1, min_p=0.1, presence_penalty=1, frequency_penalty=-1, repetition_penalty=1.5,
        logit_bias={"7": -100}, stop_token_ids=[9], logprobs=True, top_logprobs=2, stop="end",
    )  # fmt: skip
    sampling = ask.sampling(50, lambda: 4)
    assert (sampling.max_tokens, sampling.min_tokens, sampling.ignore_eos) == (5, 2, True)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0, 0.5, 0, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (
        1,
        -1,
        1.5,
    )
    assert (sampling.logit_bias, sampling.stop_token_ids, sampling.logprobs) == (((7, -100.0),), (9,), 2)
    assert 0 <= sampling.seed < 1 << 63
    assert ask.stop == ("end",)


def test_max_tokens_is_capped_by_the_room_there_is() -> None:
    assert completion(max_tokens=10**9).sampling(20, lambda: 1).max_tokens == 20


def test_parts_of_text_and_the_developers_role() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    ask = chat(messages=[{"role": "developer", "content": parts}, {"role": "user", "content": "\U0001f600"}])
    assert [message.for_template() for message in ask.messages] == [
        {"role": "system", "content": "a\nb"},
        {"role": "user", "content": "\U0001f600"},
    ]


def test_instructions_go_with_as_many_messages_as_a_response_takes() -> None:
    def respond(num_messages: int) -> ResponsesRequest:
        messages = [{"role": "user", "content": "x"}] * num_messages
        body = {"model": "m", "instructions": "Be brief.", "input": messages}
        ask = parse_body(orjson.dumps(body), ResponsesRequest)
        ask.check(VOCAB)
        return ask

    assert len(respond(MAX_ITEMS).chat.messages) == MAX_MESSAGES
    with pytest.raises(InvalidRequest) as caught:
        respond(MAX_ITEMS + 1)
    assert caught.value.param == "input"
