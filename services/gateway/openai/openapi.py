"""/openapi.json: what can be asked here, as OpenAPI 3.1, made from the models that validate it.

Pure: knows the served model's numbers, nothing of HTTP frameworks.
"""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Final

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from services.gateway.openai import bodies
from services.gateway.openai.base import MARK
from services.gateway.openai.chat import ChatRequest
from services.gateway.openai.completions import CompletionRequest
from services.gateway.openai.responses import ResponsesRequest
from services.gateway.openai.tokens import DetokenizeRequest, TokenizeRequest

Schema = dict[str, Any]

_REFS: Final = "#/components/schemas/{model}"

TTFT: Final = "X-Galley-TTFT-Ms"
TPOT: Final = "X-Galley-TPOT-Ms"
TIMING: Final = "X-Galley-Timing"
BUDGET: Final = r"^[1-9][0-9]{0,7}(\.[0-9]{1,3})?$"
"""Milliseconds, as a header spells them."""

ERRORS: Final = {
    400: "The request is not valid; `param` names the field where it is one.",
    401: "An API key is needed, and this is none.",
    404: "There is no such model.",
    405: "The path does not take this method.",
    413: "The body is too large.",
    415: "The body is no application/json.",
    429: "Too much is going on; come back after `Retry-After` seconds.",
    500: "A fault of the gateway's own.",
    502: "Workers gave the request up, again and again.",
    503: "Nobody serves at the moment; come back after `Retry-After` seconds.",
    504: "The request passed its deadline.",
}
_WITHOUT_BODY: Final = (400, 401, 404, 405, 500)
_WITHOUT_WORK: Final = (400, 401, 404, 405, 413, 415, 429, 500)


@dataclass(frozen=True, slots=True)
class Post:
    path: str
    summary: str
    body: type[BaseModel]
    answer: type[BaseModel]
    generates: bool = True


@dataclass(frozen=True, slots=True)
class Get:
    path: str
    summary: str
    answer: type[BaseModel] | None
    statuses: tuple[int, ...] = (200,)


POSTS: Final = (
    Post("/v1/chat/completions", "Answer a chat", ChatRequest, bodies.ChatCompletion),
    Post("/v1/completions", "Go on with a text", CompletionRequest, bodies.TextCompletion),
    Post("/v1/responses", "Answer a text or a chat", ResponsesRequest, bodies.Response),
    Post("/tokenize", "Text to tokens", TokenizeRequest, bodies.Tokenized, generates=False),
    Post("/detokenize", "Tokens to text", DetokenizeRequest, bodies.Detokenized, generates=False),
)
GETS: Final = (
    Get("/v1/models", "List the models", bodies.ModelList),
    Get("/v1/models/{model}", "Describe a model", bodies.ModelCard),
    Get("/healthz", "Whether the process lives", bodies.Health),
    Get("/readyz", "Whether a request can be served", bodies.Health, (200, 503)),
    Get("/health", "The same as /readyz", bodies.Health, (200, 503)),
    Get("/metrics", "Metrics, as Prometheus reads them", None),
)


def document(model: str, max_model_len: int, vocab_size: int, *, takes_empty_prompt: bool) -> Schema:
    """The whole document. Takes some milliseconds; it does not change while the process lives."""
    marks: dict[str, Schema] = {
        "token": {"maximum": vocab_size - 1},
        "prompt": {} if takes_empty_prompt else {"minLength": 1},
        "prompt_ids": {"maxItems": max_model_len - 1},
        "model": {"const": model},
    }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Galley",
            "version": "1",
            "description": f"OpenAI's API for {model}. null stands for an absent field.",
        },
        "paths": {
            **{post.path: {"post": _post(post)} for post in POSTS},
            **{get.path: {"get": _get(get, model)} for get in GETS},
        },
        "components": {"schemas": _schemas(marks)},
    }


def _schemas(marks: dict[str, Schema]) -> Schema:
    requests = [post.body for post in POSTS]
    answers = [post.answer for post in POSTS] + [get.answer for get in GETS if get.answer] + [bodies.Error]
    wanted = [(cls, "validation") for cls in (*requests, *dict.fromkeys(answers))]
    _, made = models_json_schema(wanted, ref_template=_REFS)  # type: ignore[arg-type]
    schemas: Schema = deepcopy(made["$defs"])
    for cls in requests:
        _allow_null(schemas[cls.__name__])
    for schema in schemas.values():
        for node in _nodes(schema):
            if isinstance(node.get("title"), str):
                del node["title"]
            node.update(marks.get(node.pop(MARK, ""), {}))
    return schemas


def _allow_null(schema: Schema) -> None:
    """null means absent for every field of a body that need not be there."""
    for name, field in schema["properties"].items():
        if name not in schema.get("required", ()) and {"type": "null"} not in field.get("anyOf", ()):
            default = {"default": field.pop("default")} if "default" in field else {}
            schema["properties"][name] = {"anyOf": [field, {"type": "null"}], **default}


def _nodes(schema: object) -> Iterator[Schema]:
    """Every object of the tree, those that name properties included."""
    if isinstance(schema, dict):
        yield schema
        for value in list(schema.values()):
            yield from _nodes(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _nodes(value)


def _post(post: Post) -> Schema:
    content: Schema = {"application/json": {"schema": _ref(post.answer)}}
    if post.generates:
        event = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
        content["text/event-stream"] = {"schema": event}
    return {
        "summary": post.summary,
        "operationId": post.path.strip("/").replace("/", "_"),
        **({"parameters": _generation_headers()} if post.generates else {}),
        "requestBody": {"required": True, "content": {"application/json": {"schema": _ref(post.body)}}},
        "responses": {
            "200": {"description": "The answer", "headers": _headers(), "content": content},
            **_errors(tuple(ERRORS) if post.generates else _WITHOUT_WORK),
        },
    }


def _get(get: Get, model: str) -> Schema:
    kind = {"application/json": {"schema": _ref(get.answer)}} if get.answer else {"text/plain": {}}
    known = {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "const": model}}
    answer = {"description": get.summary, "headers": _headers(), "content": kind}
    return {
        "summary": get.summary,
        "operationId": get.path.strip("/").replace("/", "_").replace("{", "").replace("}", ""),
        **({"parameters": [known]} if "{model}" in get.path else {}),
        "responses": {
            **_errors(_WITHOUT_BODY),
            **{str(status): answer for status in get.statuses},
        },
    }


def _generation_headers() -> list[Schema]:
    budget = {"type": "string", "pattern": BUDGET}
    return [
        {
            "name": TTFT,
            "in": "header",
            "description": "SLO: ms to the first token",
            "schema": budget,
        },
        {"name": TPOT, "in": "header", "description": "SLO: ms per later token", "schema": budget},
        {"name": TIMING, "in": "header", "description": "1: add `galley`", "schema": {"enum": ["0", "1"]}},
    ]


def _errors(statuses: tuple[int, ...]) -> Schema:
    return {
        str(status): {
            "description": ERRORS[status],
            "headers": _headers(),
            "content": {"application/json": {"schema": _ref(bodies.Error)}},
        }
        for status in statuses
    }


def _headers() -> Schema:
    return {"X-Request-Id": {"required": True, "schema": {"type": "string"}}}


def _ref(cls: type[BaseModel]) -> Schema:
    return {"$ref": _REFS.format(model=cls.__name__)}
