"""The fields that chat and completion requests share, and what they mean for sampling.

Knows nothing of prompts, answers and HTTP.
"""

from collections.abc import Callable
from functools import cached_property
from typing import Annotated, Any, Final

from pydantic import Field, PlainValidator, WithJsonSchema

from common.errors import InvalidRequest
from common.messages.generation import SamplingParams
from services.gateway.openai.base import STREAM_OPTIONS, TOKEN, ModelName, OpenAIModel, only
from services.gateway.openai.structured import (
    Choices,
    Constraint,
    Expression,
    ResponseFormat,
    StructuredOutputs,
    constraint_of,
)

MAX_STOPS = 4
MAX_STOP_CHARS = 1024
MAX_CHOICES = 128
MAX_LOGPROBS = 20
_SEED_BITS = (1 << 63) - 1


def _stops(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        value = [value] if value else []
    if not isinstance(value, list) or not all(isinstance(stop, str) for stop in value):
        raise ValueError("give a string or an array of strings")
    if len(value) > MAX_STOPS:
        raise ValueError(f"at most {MAX_STOPS} stop strings are possible")
    if any(not 0 < len(stop) <= MAX_STOP_CHARS for stop in value):
        raise ValueError(f"a stop string has 1 to {MAX_STOP_CHARS} characters")
    return tuple(value)


def _biases(value: Any) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, dict) or len(value) > 1024:
        raise ValueError("give an object of at most 1024 token ids")
    for token, bias in value.items():
        if not (token.isascii() and token.isdecimal()):
            raise ValueError(f"{token[:20]!r} is not a token id")
        if not isinstance(bias, int | float) or isinstance(bias, bool) or not -100 <= bias <= 100:
            raise ValueError(f"the bias of token {token[:20]} is no number from -100 to 100")
    return tuple((int(token[:12]), float(bias)) for token, bias in value.items())


def _token_ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > 1024 or not all(type(token) is int for token in value):
        raise ValueError("give an array of at most 1024 token ids")
    return tuple(value)


_STOP: Final[Any] = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
_STOPS: Final[Any] = {
    "anyOf": [
        {"type": "string", "maxLength": MAX_STOP_CHARS},
        {"type": "array", "items": _STOP, "maxItems": MAX_STOPS},
    ]
}
_TOKEN_IDS: Final[Any] = {"type": "array", "items": TOKEN, "maxItems": 1024}
_BIASES: Final[Any] = {
    "type": "object",
    "propertyNames": {"pattern": "^[0-9]+$"},
    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    "maxProperties": 1024,
}


class StreamOptions(OpenAIModel):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Annotated[bool, only(False)] | None = None


class SamplingFields(OpenAIModel):
    """Fields of both endpoints; extensions to OpenAI's are named as vLLM names them."""

    model_config = STREAM_OPTIONS

    model: ModelName
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] = 0
    ignore_eos: bool = False
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    seed: Annotated[int, Field(ge=-(1 << 63), le=(1 << 64) - 1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    stop: Annotated[tuple[str, ...], PlainValidator(_stops), WithJsonSchema(_STOPS)] = ()
    stop_token_ids: Annotated[tuple[int, ...], PlainValidator(_token_ids), WithJsonSchema(_TOKEN_IDS)] = ()
    include_stop_str_in_output: bool = False
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] = 1.0
    logit_bias: Annotated[
        tuple[tuple[int, float], ...], PlainValidator(_biases), WithJsonSchema(_BIASES)
    ] = ()
    user: str = ""
    metadata: dict[str, str] = Field(default_factory=dict)
    priority: Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)] = 0
    cache_salt: Annotated[str, Field(max_length=256)] = ""
    return_token_ids: bool = False
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_choice: Choices | None = None
    guided_regex: Expression | None = None
    # Known, but not supported: they pass where they ask for nothing.
    skip_special_tokens: Annotated[bool, only(True)] = True
    service_tier: Annotated[str, only("auto", "default")] = "auto"
    store: Annotated[bool, only(False)] = False
    prompt_cache_key: str = ""
    prompt_cache_retention: Annotated[str, only("in_memory", "in-memory")] = "in_memory"
    safety_identifier: str = ""

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def output_limit(self) -> int | None:
        """Most output tokens that the client wants; None is as many as fit."""
        return self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives to report per token; None for no logprobs at all."""
        return None

    @cached_property
    def constraint(self) -> Constraint | None:
        """What the output must look like. Raises InvalidRequest."""
        return constraint_of(
            self.response_format, self.structured_outputs, self.guided_choice, self.guided_regex
        )

    def check(self, vocab_size: int) -> None:
        """What no single field tells, but for what only a compiled grammar does. Raises InvalidRequest."""
        _ = self.constraint
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options goes with stream: true only", param="stream_options")
        if self.output_limit is not None and self.min_tokens > self.output_limit:
            raise InvalidRequest("min_tokens is above max_tokens", param="min_tokens")
        check_ids((token for token, _ in self.logit_bias), vocab_size, "logit_bias")
        check_ids(self.stop_token_ids, vocab_size, "stop_token_ids")

    def sampling(self, max_tokens: int, draw_seed: Callable[[], int]) -> SamplingParams:
        """For a prompt that leaves room for `max_tokens` output tokens."""
        wanted = self.output_limit
        return SamplingParams(
            max_tokens=max_tokens if wanted is None else min(wanted, max_tokens),
            seed=draw_seed() if self.seed is None else self.seed & _SEED_BITS,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=max(self.top_k, 0),
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self.logit_bias,
            min_tokens=min(self.min_tokens, max_tokens),
            ignore_eos=self.ignore_eos,
            stop_token_ids=self.stop_token_ids,
            logprobs=self.num_logprobs,
            grammar=self.constraint.grammar if self.constraint else "",
        )


def check_ids(ids: Any, vocab_size: int, param: str) -> None:
    """Raises InvalidRequest for an id that the model does not have."""
    for token in ids:
        if not 0 <= token < vocab_size:
            raise InvalidRequest(f"{param}: this model has no token {token}", param=param)
