"""The OpenAPI document agrees with the models that validate: what one takes, so does the other."""

from typing import Any

import pytest
from jsonschema import Draft202012Validator

from common.errors import InvalidRequest
from services.gateway.openai.base import validate
from services.gateway.openai.chat import ChatRequest
from services.gateway.openai.completions import CompletionRequest
from services.gateway.openai.openapi import ERRORS, document
from services.gateway.openai.responses import ResponsesRequest
from services.gateway.openai.tokens import DetokenizeRequest, TokenizeRequest

Body = dict[str, Any]

VOCAB, CONTEXT = 300, 100
DOCUMENT = document("m", CONTEXT, VOCAB, takes_empty_prompt=False)
MESSAGE = {"role": "user", "content": "x"}
BASES: dict[type, Body] = {
    ChatRequest: {"model": "m", "messages": [MESSAGE]},
    CompletionRequest: {"model": "m", "prompt": "x"},
    ResponsesRequest: {"model": "m", "input": "x"},
    TokenizeRequest: {"prompt": "x"},
    DetokenizeRequest: {"tokens": [1]},
}


def allows(cls: type, body: Body) -> bool:
    schema = {"$ref": f"#/components/schemas/{cls.__name__}", "components": DOCUMENT["components"]}
    return bool(Draft202012Validator(schema).is_valid(body))


def takes(cls: Any, body: Body) -> bool:
    try:
        ask = validate(body, cls)
        ask.check() if cls is TokenizeRequest else ask.check(VOCAB)
    except InvalidRequest:
        return False
    return True


@pytest.mark.parametrize("cls", BASES, ids=lambda cls: cls.__name__)
def test_the_schema_is_one_and_null_stands_for_absent(cls: type) -> None:
    schema = DOCUMENT["components"]["schemas"][cls.__name__]
    Draft202012Validator.check_schema(schema)
    base = BASES[cls]
    optional = [name for name in schema["properties"] if name not in base]
    assert takes(cls, base)
    assert allows(cls, base)
    for name in optional:
        assert takes(cls, base | {name: None}), name
        assert allows(cls, base | {name: None}), name
    assert not allows(cls, base | {"wibble": 1})


@pytest.mark.parametrize(
    ("cls", "change"),
    [
        (ChatRequest, {"messages": []}),
        (ChatRequest, {"messages": [{"role": "user"}]}),
        (ChatRequest, {"messages": [{"role": "user", "content": None}]}),
        (ChatRequest, {"messages": [{"role": "wizard", "content": "x"}]}),
        (ChatRequest, {"messages": [MESSAGE | {"odd": 1}]}),
        (ChatRequest, {"messages": [MESSAGE | {"content": [{"type": "image_url"}]}]}),
        (ChatRequest, {"messages": [MESSAGE | {"content": [{"type": "text", "text": "x", "odd": 1}]}]}),
        (ChatRequest, {"tools": [{}]}),
        (ChatRequest, {"tool_choice": "required"}),
        (ChatRequest, {"store": True}),
        (ChatRequest, {"service_tier": "flex"}),
        (ChatRequest, {"modalities": ["audio"]}),
        (ChatRequest, {"n": 0}),
        (ChatRequest, {"stop": list("abcde")}),
        (ChatRequest, {"stop": [""]}),
        (ChatRequest, {"logit_bias": {"x": 1}}),
        (ChatRequest, {"logit_bias": {"1": 101}}),
        (ChatRequest, {"stop_token_ids": [VOCAB]}),
        (ChatRequest, {"stream_options": {"include_usage": True}}),
        (CompletionRequest, {"prompt": []}),
        (CompletionRequest, {"prompt": [[]]}),
        (CompletionRequest, {"prompt": [VOCAB]}),
        (CompletionRequest, {"prompt": ["x", 5]}),
        (CompletionRequest, {"suffix": "x"}),
        (ResponsesRequest, {"input": 5}),
        (ResponsesRequest, {"input": [{"role": "tool", "content": "x"}]}),
        (ResponsesRequest, {"tools": [{}]}),
        (ResponsesRequest, {"stream_options": {}}),
        (TokenizeRequest, {"messages": [MESSAGE]}),
        (TokenizeRequest, {"prompt": None}),
        (DetokenizeRequest, {"tokens": [-1]}),
        (DetokenizeRequest, {"tokens": ["1"]}),
    ],
)
def test_what_is_refused_is_forbidden(cls: type, change: Body) -> None:
    assert not takes(cls, BASES[cls] | change)
    assert not allows(cls, BASES[cls] | change)


@pytest.mark.parametrize(
    ("cls", "change"),
    [
        (ChatRequest, {"messages": [{"role": "assistant"}, MESSAGE]}),
        (ChatRequest, {"messages": [{"role": "assistant", "content": None, "tool_calls": []}]}),
        (ChatRequest, {"messages": [MESSAGE | {"content": [{"type": "text", "text": "x"}], "name": "me"}]}),
        (ChatRequest, {"tools": [], "tool_choice": "none", "store": False, "service_tier": "auto"}),
        (ChatRequest, {"parallel_tool_calls": True, "modalities": ["text"], "metadata": {"a": "b"}}),
        (ChatRequest, {"stream": True, "stream_options": {"include_usage": None}}),
        (ChatRequest, {"stop": "x", "logit_bias": {"1": -100}, "temperature": 0, "priority": -1}),
        (CompletionRequest, {"prompt": [1, 2]}),
        (CompletionRequest, {"prompt": ["x", [1]]}),
        (ResponsesRequest, {"input": [MESSAGE], "text": {"format": {"type": "text"}}}),
        (ResponsesRequest, {"input": [MESSAGE | {"content": [{"type": "input_text", "text": "x"}]}]}),
        (TokenizeRequest, {"prompt": None, "messages": [MESSAGE]}),
        (DetokenizeRequest, {"tokens": []}),
    ],
)
def test_what_is_taken_is_allowed(cls: type, change: Body) -> None:
    assert takes(cls, BASES[cls] | change)
    assert allows(cls, BASES[cls] | change)


def test_what_only_this_model_decides_is_in_the_document() -> None:
    assert not allows(CompletionRequest, {"model": "other", "prompt": "x"})
    assert not allows(CompletionRequest, {"model": "m", "prompt": ""})
    assert not allows(CompletionRequest, {"model": "m", "prompt": [1] * CONTEXT})
    assert allows(CompletionRequest, {"model": "m", "prompt": [VOCAB - 1] * (CONTEXT - 1)})
    assert "x-galley" not in str(DOCUMENT)


def test_every_error_is_described() -> None:
    for path, methods in DOCUMENT["paths"].items():
        for operation in methods.values():
            assert {"200", "400", "401", "405", "500"} <= set(operation["responses"]), path
    chat = DOCUMENT["paths"]["/v1/chat/completions"]["post"]["responses"]
    assert set(chat) == {"200", *map(str, ERRORS)}
