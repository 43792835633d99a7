"""What all request bodies have in common: strict models, null as absent, errors that name the field.

Knows nothing of particular requests and of HTTP.
"""

import json
from typing import Annotated, Any, Final, TypeVar

import orjson
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema

from common.errors import InvalidRequest

R = TypeVar("R", bound=BaseModel)


MARK: Final = "x-galley"
"""In a JSON schema: what the served model decides (a highest token, say) goes here; see openapi.py."""


class OpenAIModel(BaseModel):
    """Types are taken as they are ("5" is no number), and a field that we do not know is an error.

    null stands for an absent field, at every level: clients send back whole objects that they once got.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, values: Any) -> Any:
        return without_nulls(values) if isinstance(values, dict) else values


def without_nulls(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


ModelName = Annotated[str, Field(json_schema_extra={MARK: "model"})]
TOKEN: Final[Any] = {"type": "integer", "minimum": 0, MARK: "token"}


def either(*branches: dict[str, Any]) -> ConfigDict:
    """For models whose fields go together in some ways only: one of `branches` has to hold in the schema."""
    return ConfigDict(json_schema_extra={"anyOf": list(branches)})


NULL: Final[Any] = {"type": "null"}
STREAM_OPTIONS: Final = either(
    {"properties": {"stream_options": NULL}},
    {"properties": {"stream": {"const": True}}, "required": ["stream"]},
)
"""stream_options goes with stream: true only."""


class only:
    """For fields of OpenAI's that Galley does not support: these values, which ask for nothing, may pass."""

    def __init__(self, *allowed: object) -> None:
        self._allowed = allowed

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"enum": list(self._allowed), "description": "Not supported: for clients that always send it."}

    def _check(self, value: object) -> object:
        if not any(type(value) is type(one) and value == one for one in self._allowed):
            default = orjson.dumps(self._allowed[0]).decode()
            raise ValueError(f"is not supported; leave it out or use {default}")
        return value


def parse_body(body: bytes, cls: type[R]) -> R:
    """A request from JSON. Raises InvalidRequest with `param` where one field is at fault."""
    return validate(parse_object(body), cls)


def parse_object(body: bytes) -> dict[str, Any]:
    """A JSON object, no key of which is there twice. Raises InvalidRequest."""
    try:
        orjson.loads(body)  # strict: refuses NaN, broken UTF-8, lone surrogates and deep nesting
        value = json.loads(body, object_pairs_hook=_unique)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise InvalidRequest("the body is nested too deeply") from error
    if not isinstance(value, dict):
        raise InvalidRequest("the body must be a JSON object")
    return value


def validate(values: dict[str, Any], cls: type[R]) -> R:
    try:
        return cls.model_validate(values)
    except ValidationError as error:
        raise _explain(error) from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise InvalidRequest("the body has a key twice in one object")
    return found


def _explain(failure: ValidationError) -> InvalidRequest:
    """The first thing that is wrong, in words of the request's own fields."""
    error = failure.errors(include_url=False, include_input=False)[0]
    param = _path(error["loc"])
    match error["type"]:
        case "extra_forbidden":
            message = f"unknown field {param}"
        case "missing":
            message = f"{param} is required"
        case "value_error":
            message = f"{param}: {error['ctx']['error']}"
        case _:
            message = f"{param}: {error['msg'][:1].lower()}{error['msg'][1:]}"
    return InvalidRequest(message, param=param)


def _path(loc: tuple[int | str, ...]) -> str:
    """("messages", 0, "role") is messages[0].role."""
    path = ""
    for step in loc:
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else step
    return path
