"""From the tokens of one choice to the text that a client sees of it.

`Detokenizer` never splits a character, `StopMatcher` lets no text out that may become a stop string, and
`ChoiceText` joins them token by token, so that neither the text nor the count of tokens depends on how they
were batched. Pure. Knows nothing of attempts and HTTP.
"""

from collections.abc import Callable, Sequence

from common.messages.stream import TokenLogprobs
from services.gateway.request import Delta, Token

Decode = Callable[[Sequence[int]], str]

_UNKNOWN = "\ufffd"
_MAX_HELD = 64


class Detokenizer:
    """Pieces of text that add up to the decoding of all tokens, by any function that puts U+FFFD where bytes
    make no character (yet).

    Decoding is done over a window: the tokens of the last settled piece, for context (decoders of the
    sentencepiece kind drop the first space), and everything after it. Text is settled up to a U+FFFD at
    the window's end, which may be the beginning of a character; `flush` lets it out. A run of 64
    tokens that end in no character is taken for what it seems to be, which bounds the window.

    `hidden` tokens (the special ones) are left out before decoding, so that a character whose bytes
    surround one is still whole.
    """

    def __init__(self, decode: Decode, hidden: frozenset[int] = frozenset()) -> None:
        self._decode = decode
        self._hidden = hidden
        self._window: list[int] = []
        self._context = 0
        """Tokens at the start of the window that were let out whole before."""
        self._sent = 0
        """Characters of the window's text that were let out."""

    def push(self, token: int) -> str:
        """The text that is certain with this token."""
        if token in self._hidden:
            return ""
        self._window.append(token)
        text = self._decode(self._window)
        if text.endswith(_UNKNOWN) and len(self._window) - self._context < _MAX_HELD:
            return self._let_out(text.rstrip(_UNKNOWN))
        piece = self._let_out(text)
        if not piece and self._context:
            self._window.pop()  # an id without text must not become the only context
            return ""
        # What is settled now is the next window's context, and only its own text is known to be sent.
        del self._window[: self._context]
        self._context = len(self._window)
        self._sent = len(self._decode(self._window))
        return piece

    def flush(self) -> str:
        """What is left when no more tokens come: bytes that never became a character."""
        return self._let_out(self._decode(self._window)) if self._window else ""

    def _let_out(self, text: str) -> str:
        piece = text[self._sent :]
        self._sent = max(self._sent, len(text))
        return piece


class StopMatcher:
    """Feeds on text; the result does not depend on how the text was cut into pieces.

    The stop string whose match *ends* first wins (then the longer one), because that is the one that is
    seen first when text comes character by character. With `include`, the match itself is let out.
    """

    def __init__(self, stops: tuple[str, ...], *, include: bool = False) -> None:
        if "" in stops:
            raise ValueError("an empty stop string matches everywhere")
        self._stops = stops
        self._include = include
        self._held = ""
        self.matched = False

    def feed(self, text: str) -> str:
        """Text that is certain now. After a match there is none any more."""
        if self.matched or not self._stops:
            return "" if self.matched else text
        text = self._held + text
        ends = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            self.matched = True
            self._held = ""
            end, start = min(ends)
            return text[: end if self._include else start]
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The text is over: what was held back is no stop string."""
        held, self._held = self._held, ""
        return held


class ChoiceText:
    """Tokens in, deltas out. `special` ids are never shown, an id in `ending` ends the choice unseen.

    Once `stopped` (a stop string was matched), nothing more comes out, and the tokens after the one that
    completed the match are not counted.
    """

    def __init__(
        self,
        index: int,
        decode: Decode,
        special: frozenset[int],
        ending: frozenset[int],
        matcher: StopMatcher,
    ) -> None:
        self.num_tokens = 0
        self._index = index
        self._ending = ending
        self._detokenizer = Detokenizer(decode, special | ending)
        self._matcher = matcher

    @property
    def stopped(self) -> bool:
        return self._matcher.matched

    def push(self, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...] = ()) -> Delta:
        """The next tokens of the choice; `logprobs` is empty or has one for each."""
        pieces: list[str] = []
        tokens: list[Token] = []
        for position, token in enumerate(token_ids):
            if self.stopped:
                break
            self.num_tokens += 1
            pieces.append(self._matcher.feed(self._detokenizer.push(token)))
            if token not in self._ending:
                tokens.append(Token(token, logprobs[position] if logprobs else None))
        return Delta(self._index, "".join(pieces), tuple(tokens), "stop" if self.stopped else None)

    def flush(self) -> str:
        """The text that was held back, once the choice has ended."""
        if self.stopped:
            return ""
        return self._matcher.feed(self._detokenizer.flush()) + self._matcher.flush()


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[len(text) - length :]):
            return length
    return 0
