"""What a grammar means in one model's tokens: compiling it, or saying why that cannot be.

A thin layer over llguidance. Needs the model's tokenizer.json and no torch, so that the gateway refuses
by the same rules what a worker would refuse. Knows nothing of sequences and of requests' fields.
"""

import random
import time
from collections.abc import Sequence as Seq
from functools import lru_cache
from pathlib import Path
from typing import Final

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from common.errors import InvalidRequest

MAX_CHARS: Final = 1 << 18
"""Longest grammar that is looked at."""

_LIMITS: Final = LLParserLimits(
    initial_lexer_fuel=200_000, max_lexer_states=20_000, max_grammar_size=20_000, verbose_errors=False
)
"""Fractions of llguidance's defaults: no grammar is to hold the model's thread for more than some 200 ms, or
more than some 40 MB. A schema of 2,000 properties passes."""

_TRIAL_TOKENS: Final = 128
_TRIAL_OUTPUTS: Final = 3
_TRIAL_S: Final = 0.25
"""How far a grammar is followed before it is taken: in tokens, outputs, and s of the thread's own time."""
_REMEMBERED: Final = 64


class GrammarCompiler:
    """Makes matchers, each at its grammar's start. Thread-safe; the matchers are not.

    `vocab_size` is the width of the model's logits. Without a tokenizer.json that can be read, every
    grammar is refused.
    """

    def __init__(self, directory: Path, vocab_size: int, eos_token_ids: Seq[int]) -> None:
        self._vocab_size = vocab_size
        self._eos = frozenset(eos_token_ids)
        self._tokenizer = _read(directory / "tokenizer.json", vocab_size, list(eos_token_ids))
        known = self._tokenizer.vocab_size if self._tokenizer else vocab_size
        self.mask_words = (known + 31) // 32
        """32-bit words of a mask; its bits beyond the model's vocabulary mean nothing."""
        self._fault = lru_cache(_REMEMBERED)(self._find_fault)

    def compile(self, grammar: str) -> LLMatcher:
        """Raises InvalidRequest for what is no grammar, or one that is too complex."""
        if self._tokenizer is None:
            raise InvalidRequest("structured output is not supported: this model has no tokenizer.json")
        if len(grammar) > MAX_CHARS:
            raise InvalidRequest(f"{len(grammar)} characters are too many for a grammar")
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise InvalidRequest(explain(matcher))
        return matcher

    def check(self, grammar: str) -> None:
        """As `compile`; also follows it for some tokens, because a limit may be met on the way only."""
        if fault := self._fault(grammar):
            raise InvalidRequest(fault)

    def _find_fault(self, grammar: str) -> str:
        """ "" for a grammar that bears some random outputs; the first repeats itself where it can."""
        try:
            start = self.compile(grammar)
        except InvalidRequest as error:
            return error.message
        dice, end = random.Random(0), time.thread_time() + _TRIAL_S
        for number in range(_TRIAL_OUTPUTS):
            matcher, token = start.deep_copy(), -1
            for _ in range(_TRIAL_TOKENS):
                allowed = self._allowed(matcher)
                if matcher.is_error() or time.thread_time() > end:
                    return explain(matcher) if matcher.is_error() else ""
                if not allowed.any():
                    break
                if number or token < 0 or not allowed[token]:
                    token = dice.choice(np.flatnonzero(allowed).tolist())
                matcher.consume_token(token)
        return ""

    def _allowed(self, matcher: LLMatcher) -> NDArray[np.uint8]:
        """1 for every token that may come next, but for those that only end a text."""
        bits = np.empty(self.mask_words, np.int32)
        fill(matcher, bits)
        allowed = np.unpackbits(bits.view(np.uint8), bitorder="little")
        allowed[[token for token in self._eos if token < len(allowed)]] = 0
        return allowed


def fill(matcher: LLMatcher, bits: NDArray[np.int32]) -> None:
    """Set bit i of `bits` where token i may come next; only EOS where nothing else may."""
    matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)


def explain(matcher: LLMatcher) -> str:
    """Why `matcher` is in error, in a line."""
    said = matcher.get_error().split("<state>")[0].replace("<non-verbose/>", "")
    if said.startswith("NoExtension"):
        return "nothing can satisfy it"
    return " ".join(said.split())[:300]


def _read(path: Path, vocab_size: int, eos: list[int]) -> LLTokenizer | None:
    if not path.is_file():
        return None
    text = path.read_text(encoding="utf-8")
    for width in (vocab_size, None):
        try:
            return LLTokenizer(text, n_vocab=width, eos_token=eos or None)
        except ValueError:
            continue  # more tokens than the model has logits, or a tokenizer of a kind it does not know
    return None
