"""Log probabilities in OpenAI's two shapes. Knows nothing of the rest of an answer."""

from collections.abc import Callable, Sequence

from common.messages.stream import TokenLogprobs
from services.gateway.request import Token

BytesOf = Callable[[int], bytes]
Entry = dict[str, object]


def chat_logprobs(tokens: Sequence[Token], bytes_of: BytesOf) -> dict[str, object]:
    """`logprobs` of a chat choice: {content: [{token, logprob, bytes, top_logprobs}]}."""
    content = []
    for token in tokens:
        if token.logprobs is None:
            continue
        entry = _entry(token.id, token.logprobs.logprob, bytes_of)
        entry["top_logprobs"] = [_entry(other, value, bytes_of) for other, value in token.logprobs.top]
        content.append(entry)
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """`logprobs` of a completion choice, built piece by piece because text_offset counts on."""

    def __init__(self, bytes_of: BytesOf) -> None:
        self._bytes_of = bytes_of
        self._offset = 0

    def of(self, tokens: Sequence[Token], *, first: Token | None = None) -> dict[str, object]:
        """{tokens, token_logprobs, top_logprobs, text_offset}; offsets are in characters of token texts.

        `first` is a prompt's first token, for which nothing is known: null.
        """
        texts: list[str] = []
        values: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for token in (first, *tokens):
            if token is None or (token.logprobs is None and token is not first):
                continue
            text = self._text(token.id)
            texts.append(text)
            offsets.append(self._offset)
            self._offset += len(text)
            own = token.logprobs
            values.append(own.logprob if own else None)
            tops.append(self._tops(own, text) if own else None)
        return {"tokens": texts, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}

    def _tops(self, own: TokenLogprobs, text: str) -> dict[str, float]:
        top: dict[str, float] = {}
        for other, value in own.top:
            # Of tokens that read alike (halves of characters, say) the likeliest is shown.
            top.setdefault(self._text(other), value)
        return top | {text: own.logprob}

    def _text(self, token: int) -> str:
        return self._bytes_of(token).decode(errors="replace")


def _entry(token: int, logprob: float, bytes_of: BytesOf) -> Entry:
    spelled = bytes_of(token)
    text = spelled.decode(errors="replace")
    return {"token": text, "logprob": logprob, "bytes": list(spelled)}
