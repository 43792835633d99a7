"""Answers in OpenAI's shapes: whole bodies and stream chunks, for chat and for completions, and errors.

With `token_ids`, what vLLM's `return_token_ids` adds: each choice has the ids of its tokens, all but the one
that ended it. Pure: deltas in, JSON-able dicts out. Knows nothing of SSE and HTTP.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

from common.errors import GalleyError
from common.messages.stream import TokenLogprobs
from services.gateway.openai.logprobs import BytesOf, CompletionLogprobs, chat_logprobs
from services.gateway.request import Delta, Timing, Token, Usage

Body = dict[str, object]


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What every body of one answer repeats. `created` is in seconds since the epoch."""

    id: str
    created: int
    model: str
    fingerprint: str

    def body(self, kind: str, choices: list[Body]) -> Body:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
        }


@dataclass(slots=True)
class WholeChoice:
    """One choice gathered from its deltas."""

    text: str
    tokens: list[Token]
    finish: str
    prompt: tuple[TokenLogprobs, ...] = ()


def gather(deltas: Sequence[Delta], num_choices: int) -> list[WholeChoice]:
    choices = []
    deltas_of: list[list[Delta]] = [[] for _ in range(num_choices)]
    for delta in deltas:
        deltas_of[delta.choice].append(delta)
    for mine in deltas_of:
        text = "".join(delta.text for delta in mine)
        tokens = [token for delta in mine for token in delta.tokens]
        finish = next((delta.finish for delta in mine if delta.finish), "")
        prompt = next((delta.prompt for delta in mine if delta.prompt), ())
        choices.append(WholeChoice(text, tokens, finish, prompt))
    return choices


def usage_body(usage: Usage) -> Body:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def galley_body(timing: Timing, *, wanted: bool) -> Body:
    """What a body has more for a client that asked where its time went."""
    return {"galley": asdict(timing)} if wanted else {}


class Shape(Protocol):
    """One endpoint's way to say things; an instance serves one request."""

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> Body: ...

    def chunks(self, delta: Delta) -> Iterator[Body]:
        """Chunks for one delta; none when it has nothing to show."""
        ...

    def usage_chunk(self, usage: Usage) -> Body:
        """The last chunk, when the client asked for usage."""
        ...


class ChatShape:
    """chat.completion and chat.completion.chunk; the role goes ahead of each choice's first chunk."""

    def __init__(self, head: AnswerHead, bytes_of: BytesOf, *, logprobs: bool, token_ids: bool) -> None:
        self._head = head
        self._bytes_of = bytes_of
        self._logprobs = logprobs
        self._token_ids = token_ids
        self._begun: set[int] = set()

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> Body:
        bodies: list[Body] = [
            {
                "index": index,
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "logprobs": self._logprobs_of(choice.tokens),
                "finish_reason": choice.finish,
                **self._ids_of(choice.tokens),
            }
            for index, choice in enumerate(choices)
        ]
        return self._head.body("chat.completion", bodies) | {"usage": usage_body(usage)}

    def chunks(self, delta: Delta) -> Iterator[Body]:
        if delta.choice not in self._begun:
            self._begun.add(delta.choice)
            yield self._chunk(delta.choice, {"role": "assistant", "content": ""})
        if delta.text or delta.finish or (delta.tokens and (self._logprobs or self._token_ids)):
            content: Body = {"content": delta.text} if delta.text else {}
            yield self._chunk(delta.choice, content, delta.tokens, delta.finish)

    def usage_chunk(self, usage: Usage) -> Body:
        return self._head.body("chat.completion.chunk", []) | {"usage": usage_body(usage)}

    def _chunk(
        self, index: int, delta: Body, tokens: Sequence[Token] = (), finish: str | None = None
    ) -> Body:
        logprobs = self._logprobs_of(tokens) if tokens else None
        choice: Body = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return self._head.body("chat.completion.chunk", [choice | self._ids_of(tokens)])

    def _logprobs_of(self, tokens: Sequence[Token]) -> Body | None:
        return chat_logprobs(tokens, self._bytes_of) if self._logprobs else None

    def _ids_of(self, tokens: Sequence[Token]) -> Body:
        return {"token_ids": [token.id for token in tokens]} if self._token_ids else {}


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that goes ahead of what was made of it."""

    text: str
    ids: Sequence[int]


class CompletionShape:
    """text_completion, whole and in chunks. `echo` has the prompt of each choice, or is empty."""

    def __init__(
        self,
        head: AnswerHead,
        bytes_of: BytesOf,
        *,
        logprobs: bool,
        token_ids: bool,
        echo: Sequence[Echo] = (),
    ) -> None:
        self._head = head
        self._bytes_of = bytes_of
        self._logprobs = logprobs
        self._token_ids = token_ids
        self._builders: dict[int, CompletionLogprobs] = {}
        self._echo = dict(enumerate(echo))
        """Of the choices that have said nothing yet."""

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> Body:
        bodies = [
            self._choice(index, one.text, one.tokens, one.finish, one.prompt)
            for index, one in enumerate(choices)
        ]
        return self._head.body("text_completion", bodies) | {"usage": usage_body(usage)}

    def chunks(self, delta: Delta) -> Iterator[Body]:
        tokens = delta.prompt or delta.tokens
        if delta.text or delta.finish or (tokens and (self._logprobs or self._token_ids)):
            choice = self._choice(delta.choice, delta.text, delta.tokens, delta.finish, delta.prompt)
            yield self._head.body("text_completion", [choice])

    def usage_chunk(self, usage: Usage) -> Body:
        return self._head.body("text_completion", []) | {"usage": usage_body(usage)}

    def _choice(
        self,
        index: int,
        text: str,
        tokens: Sequence[Token],
        finish: str | None,
        prompt: Sequence[TokenLogprobs],
    ) -> Body:
        echo = self._echo.pop(index, None)
        logprobs = None
        if self._logprobs:
            builder = self._builders.setdefault(index, CompletionLogprobs(self._bytes_of))
            echoed = [Token(*pair) for pair in zip(echo.ids[1:], prompt, strict=True)] if echo else []
            logprobs = builder.of([*echoed, *tokens], first=Token(echo.ids[0]) if echo else None)
        shown = echo.text + text if echo else text
        choice: Body = {"index": index, "text": shown, "logprobs": logprobs, "finish_reason": finish}
        return choice | ({"token_ids": [token.id for token in tokens]} if self._token_ids else {})


def error_body(error: GalleyError) -> Body:
    """As OpenAI's clients expect it: {"error": {message, type, param, code}}."""
    return {
        "error": {
            "message": error.message,
            "type": error.type,
            "param": error.param,
            "code": error.code,
        }
    }


def error_headers(error: GalleyError) -> dict[str, str]:
    """Retry-After in whole seconds, where it is known when to come back."""
    if error.retry_after_s is None:
        return {}
    return {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}
