"""The body of /v1/responses: a text, or a list of messages, for one text. Becomes a chat request.

What needs memory of earlier responses, tools or anything but text is refused by name. Knows nothing of
answers.
"""

from functools import cached_property
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, PlainValidator, WithJsonSchema, model_validator

from common.errors import InvalidRequest
from services.gateway.openai.base import STREAM_OPTIONS, ModelName, OpenAIModel, only
from services.gateway.openai.chat import MAX_MESSAGES, ChatMessage, ChatRequest
from services.gateway.openai.sampling import StreamOptions
from services.gateway.openai.structured import Constraint, JsonSchemaFormat, ResponseFormat

MAX_ITEMS: Final = MAX_MESSAGES - 1
"""Instructions become a message of the chat too."""

_PART_TYPES: Final = ("input_text", "output_text", "text")


def _content(value: Any) -> str:
    """A string, or parts of text, which are joined by newlines."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("give a string or an array of parts")
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in _PART_TYPES or not isinstance(part.get("text"), str):
            raise ValueError('only parts of the form {"type": "input_text", "text": "..."} are supported')
        if odd := [key for key in part if key not in ("type", "text") and part[key] not in ([], None)]:
            raise ValueError(f"{odd[0]!r} of a part is not supported")
        texts.append(part["text"])
    return "\n".join(texts)


_PART: Final[Any] = {
    "type": "object",
    "properties": {"type": {"enum": list(_PART_TYPES)}, "text": {"type": "string"}},
    "required": ["type", "text"],
    "additionalProperties": {"enum": [None, []]},
}
_CONTENT: Final[Any] = {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}]}


class InputMessage(OpenAIModel):
    """A message as a client writes it, or as an earlier response had it in its output."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, PlainValidator(_content), WithJsonSchema(_CONTENT)]
    type: Literal["message"] | None = None
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    phase: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _is_message(cls, values: Any) -> Any:
        kind = values.get("type") if isinstance(values, dict) else None
        if kind not in (None, "message"):
            raise ValueError(
                f"only messages are supported, and nothing is stored; this is {str(kind)[:40]!r}"
            )
        return values


def _as_messages(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


_Messages = Annotated[list[InputMessage], Field(min_length=1, max_length=MAX_ITEMS)]


class TextFormat(OpenAIModel):
    """What response_format is to chat, with the schema one level higher."""

    type: Literal["text", "json_object", "json_schema"]
    definition: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None

    def for_chat(self) -> ResponseFormat:
        """Raises InvalidRequest."""
        if self.type == "json_schema" and self.definition is None:
            raise InvalidRequest("text.format.schema is required", param="text.format.schema")
        schema = (
            None if self.definition is None else JsonSchemaFormat.model_validate({"schema": self.definition})
        )
        return ResponseFormat(type=self.type, json_schema=schema)


class TextConfig(OpenAIModel):
    format: TextFormat | None = None
    verbosity: Annotated[str, only("medium")] | None = None


class Reasoning(OpenAIModel):
    """Of a model that does not reason apart from its answer."""

    effort: Annotated[str, only("none")] | None = None
    summary: Annotated[str, only("auto")] | None = None


class ResponsesRequest(OpenAIModel):
    model_config = STREAM_OPTIONS

    model: ModelName
    input: Annotated[_Messages, BeforeValidator(_as_messages, json_schema_input_type=str | _Messages)]
    instructions: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    text: TextConfig | None = None
    metadata: dict[str, str] = Field(default_factory=dict)
    user: str | None = None
    priority: Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)] = 0
    cache_salt: Annotated[str, Field(max_length=256)] = ""
    prompt_cache_key: str | None = None
    prompt_cache_retention: Annotated[str, only("in_memory", "in-memory")] | None = None
    safety_identifier: str | None = None
    reasoning: Reasoning | None = None
    # Known, but not supported: they pass where they ask for nothing.
    store: Annotated[bool, only(False)] = False
    background: Annotated[bool, only(False)] = False
    tools: Annotated[list[Any], only([])] = Field(default_factory=list)
    tool_choice: Annotated[str, only("auto", "none")] = "auto"
    parallel_tool_calls: bool = True
    include: Annotated[list[Any], only([], ["reasoning.encrypted_content"])] = Field(default_factory=list)
    top_logprobs: Annotated[int, only(0)] = 0
    truncation: Annotated[str, only("disabled")] = "disabled"
    service_tier: Annotated[str, only("auto", "default")] = "auto"

    @cached_property
    def chat(self) -> ChatRequest:
        """The same question as a chat."""
        messages = [ChatMessage(role="system", content=self.instructions)] if self.instructions else []
        messages += [ChatMessage(role=one.role, content=one.content) for one in self.input]
        asked = self.text and self.text.format
        return ChatRequest(
            model=self.model,
            messages=messages,
            stream=self.stream,
            max_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            response_format=asked.for_chat() if asked else None,
            priority=self.priority,
            cache_salt=self.cache_salt,
        )

    @cached_property
    def constraint(self) -> Constraint | None:
        """What the output must look like, in words of this body's fields. Raises InvalidRequest."""
        try:
            found = self.chat.constraint
        except InvalidRequest as error:
            raise InvalidRequest(_renamed(error.message), param=_renamed(error.param or "")) from error
        return found and Constraint(_renamed(found.param), found.grammar)

    def check(self, vocab_size: int) -> None:
        """What no single field tells. Raises InvalidRequest."""
        _ = self.constraint
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options goes with stream: true only", param="stream_options")
        self.chat.check(vocab_size)


def _renamed(text: str) -> str:
    for chat in ("response_format.json_schema", "response_format"):
        text = text.replace(chat, "text.format")
    return text
