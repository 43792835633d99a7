"""The bodies of /tokenize and /detokenize, as vLLM has them. Knows nothing of tokenizers."""

from typing import Annotated, Any, Final

from pydantic import Field, PlainValidator, WithJsonSchema

from common.errors import InvalidRequest
from services.gateway.openai.base import NULL, TOKEN, ModelName, OpenAIModel, either
from services.gateway.openai.chat import MAX_MESSAGES, ChatMessage
from services.gateway.openai.sampling import check_ids


def _token_ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(token) is int for token in value):
        raise ValueError("give an array of token ids")
    return tuple(value)


_NOT: Final[Any] = {"enum": [None, False]}
_MESSAGES: Final[Any] = {"prompt": NULL, "messages": {"type": "array"}}
_OPEN: Final[Any] = {"continue_final_message": {"const": True}, "add_generation_prompt": {"const": False}}


class TokenizeRequest(OpenAIModel):
    """Either a prompt or messages, which become the prompt that the chat template makes of them."""

    model_config = either(
        {
            "properties": {"messages": NULL, "prompt": {"type": "string"}, "continue_final_message": _NOT},
            "required": ["prompt"],
        },
        {"properties": _MESSAGES | {"continue_final_message": _NOT}, "required": ["messages"]},
        {"properties": _MESSAGES | _OPEN, "required": ["messages", *_OPEN]},
    )

    model: ModelName | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool | None = None
    """Absent: with a prompt, but not with messages, whose template adds its own."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_strs: bool = False

    def check(self) -> None:
        """What no single field tells. Raises InvalidRequest."""
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("give either prompt or messages", param="prompt")
        if self.continue_final_message and (self.messages is None or self.add_generation_prompt):
            raise InvalidRequest(
                "continue_final_message goes with messages and add_generation_prompt: false only",
                param="continue_final_message",
            )
        for index, message in enumerate(self.messages or ()):
            message.check(f"messages[{index}]")


class DetokenizeRequest(OpenAIModel):
    model: ModelName | None = None
    tokens: Annotated[
        tuple[int, ...],
        PlainValidator(_token_ids),
        WithJsonSchema({"type": "array", "items": TOKEN}),
    ]

    def check(self, vocab_size: int) -> None:
        """Raises InvalidRequest for an id that the model does not have."""
        check_ids(self.tokens, vocab_size, "tokens")
