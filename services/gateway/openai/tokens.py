"""The bodies of /tokenize and /detokenize, as vLLM has them. Knows nothing of tokenizers."""

from typing import Annotated, Any

from pydantic import Field, PlainValidator, WithJsonSchema

from common.errors import InvalidRequest
from services.gateway.openai.base import NULL, TOKEN, ModelName, OpenAIModel, either, only
from services.gateway.openai.chat import MAX_MESSAGES, ChatMessage
from services.gateway.openai.sampling import check_ids


def _token_ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(token) is int for token in value):
        raise ValueError("give an array of token ids")
    return tuple(value)


class TokenizeRequest(OpenAIModel):
    """Either a prompt or messages, which become the prompt that the chat template makes of them."""

    model_config = either(
        {"properties": {"messages": NULL, "prompt": {"type": "string"}}, "required": ["prompt"]},
        {"properties": {"prompt": NULL, "messages": {"type": "array"}}, "required": ["messages"]},
    )

    model: ModelName | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_generation_prompt: Annotated[bool, only(True)] = True
    return_token_strs: Annotated[bool, only(False)] = False

    def check(self) -> None:
        """What no single field tells. Raises InvalidRequest."""
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("give either prompt or messages", param="prompt")
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
