"""The body of /v1/chat/completions. Knows nothing of chat templates."""

from typing import Annotated, Any, Final, Literal

from pydantic import ConfigDict, Field, PlainValidator, WithJsonSchema

from common.errors import InvalidRequest
from services.gateway.openai.base import NULL, OpenAIModel, only, without_nulls
from services.gateway.openai.sampling import MAX_LOGPROBS, SamplingFields

MAX_MESSAGES: Final = 4096

Role = Literal["system", "developer", "user", "assistant", "tool", "function"]


def _content(value: Any) -> str:
    """A string, or parts of type text, which are joined by newlines."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("give a string or an array of parts")
    texts = []
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError('only parts of the form {"type": "text", "text": "..."} are supported')
        if odd := [key for key in without_nulls(part) if key not in ("type", "text")]:
            raise ValueError(f"unknown field {odd[0]!r}")
        texts.append(part["text"])
    return "\n".join(texts)


TEXT_PART: Final[Any] = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
    "additionalProperties": NULL,
}
Content = Annotated[
    str,
    PlainValidator(_content),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": TEXT_PART}]}),
]


def _with_content(schema: dict[str, Any]) -> None:
    """Say in the schema of a message that only an assistant's may be without content."""
    properties = schema.pop("properties")
    content = {"anyOf": [one for one in properties["content"]["anyOf"] if one != {"type": "null"}]}
    roles = [role for role in properties["role"]["enum"] if role != "assistant"]
    shared = {key: schema.pop(key) for key in ("type", "additionalProperties")}
    schema.pop("required")
    schema["anyOf"] = [
        {**shared, "properties": properties | {"role": {"const": "assistant"}}, "required": ["role"]},
        {
            **shared,
            "properties": properties | {"role": {"enum": roles}, "content": content},
            "required": ["role", "content"],
        },
    ]


class ChatMessage(OpenAIModel):
    model_config = ConfigDict(json_schema_extra=_with_content)

    role: Role
    content: Content | None = None
    name: str | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    tool_calls: Annotated[list[Any], only([])] | None = None
    annotations: Annotated[list[Any], only([])] | None = None
    function_call: Annotated[dict[str, Any], only({})] | None = None
    audio: Annotated[dict[str, Any], only({})] | None = None
    type: Annotated[str, only("text", "message")] | None = None
    """Not OpenAI's: evaluation harnesses mark their messages so."""

    def check(self, where: str) -> None:
        """What no single field tells; `where` is the message's own name. Raises InvalidRequest."""
        if self.content is None and self.role != "assistant":
            raise InvalidRequest(f"{where}.content is required", param=f"{where}.content")

    def for_template(self) -> dict[str, Any]:
        """As chat templates read it; they know "system", not OpenAI's newer "developer"."""
        role = "system" if self.role == "developer" else self.role
        message = {"role": role, "content": self.content or ""}
        return message if self.name is None else message | {"name": self.name}


class ChatRequest(SamplingFields):
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Annotated[list[Any], only([])] = Field(default_factory=list)
    tool_choice: Annotated[str, only("none", "auto")] = "none"
    functions: Annotated[list[Any], only([])] = Field(default_factory=list)
    function_call: Annotated[str, only("none", "auto")] = "none"
    parallel_tool_calls: bool = True
    modalities: Annotated[list[str], only(["text"])] = Field(default_factory=lambda: ["text"])
    reasoning_effort: Annotated[str, only("none")] = "none"
    verbosity: Annotated[str, only("medium")] = "medium"

    @property
    def output_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def check(self, vocab_size: int) -> None:
        super().check(vocab_size)
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs goes with logprobs: true only", param="top_logprobs")
        for index, message in enumerate(self.messages):
            message.check(f"messages[{index}]")
