"""Tokens to text, one token at a time, without ever splitting a character.

Knows nothing of stop strings and of why a text ends. The decoder is any function from token ids to text
that puts U+FFFD where bytes make no character (yet).
"""

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

_UNKNOWN = "\ufffd"
_MAX_HELD = 64


class Detokenizer:
    """Pieces that add up to the decoding of all tokens.

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
