"""The body of /v1/completions. Knows nothing of tokenizers."""

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any, Final

from pydantic import Field, PlainValidator, WithJsonSchema

from common.errors import InvalidRequest
from common.messages.generation import SamplingParams
from services.gateway.openai.base import MARK, TOKEN, only
from services.gateway.openai.sampling import MAX_CHOICES, MAX_LOGPROBS, SamplingFields, check_ids

Prompt = str | tuple[int, ...]


def _prompts(value: Any) -> tuple[Prompt, ...]:
    """A text, token ids, or an array of either; always as a tuple of prompts."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not value:
        raise ValueError("give a text, token ids, or a non-empty array of either")
    if type(value[0]) is int:
        value = [value]
    if len(value) > MAX_CHOICES:
        raise ValueError(f"at most {MAX_CHOICES} prompts are possible")
    return tuple(_prompt(one) for one in value)


def _prompt(value: Any) -> Prompt:
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(type(token) is int for token in value):
        raise ValueError("a prompt is a text or an array of token ids")
    if not value:
        raise ValueError("a prompt needs at least one token")
    return tuple(value)


_IDS: Final[Any] = {"type": "array", "items": TOKEN, "minItems": 1, MARK: "prompt_ids"}
_ONE: Final[Any] = {"anyOf": [{"type": "string", MARK: "prompt"}, _IDS]}
_PROMPTS: Final[Any] = {
    "anyOf": [*_ONE["anyOf"], {"type": "array", "items": _ONE, "minItems": 1, "maxItems": MAX_CHOICES}]
}


class CompletionRequest(SamplingFields):
    prompt: Annotated[tuple[Prompt, ...], PlainValidator(_prompts), WithJsonSchema(_PROMPTS)]
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    echo: bool = False
    suffix: Annotated[str, only("")] = ""

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Alternatives to report per token of the prompt; None for none of them."""
        return self.logprobs if self.echo else None

    def check(self, vocab_size: int) -> None:
        super().check(vocab_size)
        if self.best_of not in (None, self.n):
            raise InvalidRequest("best_of other than n is not supported", param="best_of")
        if len(self.prompt) * self.n > MAX_CHOICES:
            raise InvalidRequest(f"prompts times n is over {MAX_CHOICES}", param="n")
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequest("max_tokens of 0 goes with echo: true only", param="max_tokens")
        for prompt in self.prompt:
            if not isinstance(prompt, str):
                check_ids(prompt, vocab_size, "prompt")

    def sampling(self, max_tokens: int, draw_seed: Callable[[], int]) -> SamplingParams:
        params = replace(super().sampling(max_tokens, draw_seed), prompt_logprobs=self.num_prompt_logprobs)
        if self.max_tokens != 0:
            return params
        # Nobody sees the token that a worker samples all the same: it shall be none that ends a text.
        return replace(params, grammar="", ignore_eos=True, stop_token_ids=())
