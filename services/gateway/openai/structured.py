"""What an output must look like: response_format and vLLM's structured_outputs, as a grammar for the workers.

JSON comes on one line, with at most one space after a comma or colon: a small model that may put whitespace
wherever it likes puts nothing else. A schema's own "x-guidance" (see llguidance) decides otherwise. Knows
nothing of tokens; whether a model can follow the grammar is engine/grammar.py's to say.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from llguidance import LLMatcher
from pydantic import Field, PlainValidator, WithJsonSchema

from common.errors import InvalidRequest
from services.gateway.openai.base import OpenAIModel

MAX_ALTERNATIVES: Final = 1024
"""Texts of which an output may have to be one."""

_ONE_LINE: Final[Any] = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}


def _choices(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_ALTERNATIVES:
        raise ValueError(f"give an array of 1 to {MAX_ALTERNATIVES} strings")
    if not all(isinstance(one, str) and one for one in value):
        raise ValueError("every choice is a string that is not empty")
    return tuple(value)


Choices = Annotated[
    tuple[str, ...],
    PlainValidator(_choices),
    WithJsonSchema(
        {
            "type": "array",
            "items": {"type": "string", "minLength": 1},
            "minItems": 1,
            "maxItems": MAX_ALTERNATIVES,
        }
    ),
]
Expression = Annotated[str, Field(min_length=1)]


class JsonSchemaFormat(OpenAIModel):
    """OpenAI's wrapping of a schema; whether `strict` or not, it is followed."""

    definition: Annotated[dict[str, Any], Field(alias="schema")]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(OpenAIModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(OpenAIModel):
    choice: Choices | None = None
    regex: Expression | None = None


@dataclass(frozen=True, slots=True)
class Constraint:
    """A grammar, and the field of the request that asked for it."""

    param: str
    grammar: str


def constraint_of(
    response_format: ResponseFormat | None,
    structured: StructuredOutputs | None,
    guided_choice: tuple[str, ...] | None,
    guided_regex: str | None,
) -> Constraint | None:
    """The one constraint that is asked for, or None. Raises InvalidRequest for two, and for half of one."""
    structured = structured or StructuredOutputs()
    asked = [
        found
        for found in (
            _of_format(response_format) if response_format else None,
            _made("structured_outputs.choice", choice_grammar, structured.choice),
            _made("structured_outputs.regex", LLMatcher.grammar_from_regex, structured.regex),
            _made("guided_choice", choice_grammar, guided_choice),
            _made("guided_regex", LLMatcher.grammar_from_regex, guided_regex),
        )
        if found is not None
    ]
    if len(asked) > 1:
        first, second = asked[0].param, asked[1].param
        raise InvalidRequest(
            f"{second} does not go with {first}: an output follows one of them", param=second
        )
    return asked[0] if asked else None


def json_grammar(schema: str) -> str:
    """For a JSON schema, itself as JSON. Raises ValueError where that can be seen without compiling it."""
    grammar: str = LLMatcher.grammar_from_json_schema(schema, defaults=_ONE_LINE)
    return grammar


def choice_grammar(choices: Iterable[str]) -> str:
    """One of these texts, to the letter."""
    grammar: str = LLMatcher.grammar_from_regex("|".join("".join(map(_literal, text)) for text in choices))
    return grammar


def _of_format(asked: ResponseFormat) -> Constraint | None:
    param = "response_format.json_schema"
    if asked.type != "json_schema":
        if asked.json_schema is not None:
            raise InvalidRequest(f"{param} goes with type json_schema only", param=param)
        return (
            None if asked.type == "text" else Constraint("response_format", json_grammar('{"type":"object"}'))
        )
    if asked.json_schema is None:
        raise InvalidRequest(f"{param} is required", param=param)
    return _made(
        f"{param}.schema", json_grammar, json.dumps(asked.json_schema.definition, ensure_ascii=False)
    )


def _made(param: str, make: Callable[[Any], str], asked: object) -> Constraint | None:
    if asked is None:
        return None
    try:
        return Constraint(param, make(asked))
    except ValueError as error:
        raise InvalidRequest(f"{param}: {error}", param=param) from error


def _literal(char: str) -> str:
    """A character as an expression that matches it; most of those that are no letters mean something else."""
    return char if char.isalnum() else f"\\x{{{ord(char):x}}}"
