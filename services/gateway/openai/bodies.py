"""The shapes of answers, for /openapi.json only: answers.py and response_events.py build them as plain dicts.

That both agree is shown by the tests, which validate answers against the document. Knows nothing of HTTP.
"""

from typing import Any, Literal

from pydantic import BaseModel

from services.gateway.request import Timing

FinishReason = Literal["stop", "length"]


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    error: ErrorDetail


class CachedTokens(BaseModel):
    cached_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class TokenLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(BaseModel):
    content: list[ContentLogprob]
    refusal: None


class AssistantMessage(BaseModel):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(BaseModel):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    token_ids: list[int] = []


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    galley: Timing | None = None


class TextLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class TextChoice(BaseModel):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason
    token_ids: list[int] = []


class TextCompletion(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChoice]
    usage: Usage
    galley: Timing | None = None


class OutputText(BaseModel):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[Any]


class OutputMessage(BaseModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: Literal["completed", "incomplete"]
    content: list[OutputText]


class OutputTokensDetails(BaseModel):
    reasoning_tokens: int


class ResponseUsage(BaseModel):
    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class Response(BaseModel):
    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["completed", "incomplete"]
    error: None
    incomplete_details: dict[str, str] | None
    model: str
    instructions: str | None
    output: list[OutputMessage]
    usage: ResponseUsage
    metadata: dict[str, str]
    galley: Timing | None = None


class ModelCard(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[ModelCard]


class Tokenized(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] = []


class Detokenized(BaseModel):
    prompt: str


class Health(BaseModel):
    status: str
    reason: str = ""
