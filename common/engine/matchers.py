"""Where the sequences of a runner stand in their grammars, and which tokens may come next.

A state is a function of (grammar, output): it is rebuilt for a sequence that comes from elsewhere, and kept
from step to step for one that stays. Belongs to the thread that runs the model. Knows nothing of logits.
"""

from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from common.engine.grammar import GrammarCompiler, explain, fill
from common.engine.runner import PlanRow
from common.errors import GalleyError, InvalidRequest
from common.ids import SequenceId


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Which tokens some rows of a step may get: bit i of `bits[n]` stands for token i of row `rows[n]`."""

    rows: tuple[int, ...]
    bits: NDArray[np.int32]


@dataclass(slots=True)
class _Live:
    """A matcher that has consumed `output`."""

    grammar: str
    matcher: LLMatcher
    output: list[int]


class Matchers:
    """Keeps the latest used: at most `max_live` sequences (or one step's) and `max_grammars` grammars."""

    def __init__(self, compiler: GrammarCompiler, *, max_live: int = 1024, max_grammars: int = 64) -> None:
        self._compiler = compiler
        self._max_live = max_live
        self._max_grammars = max_grammars
        self._live: OrderedDict[SequenceId, _Live] = OrderedDict()
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()

    @property
    def num_live(self) -> int:
        return len(self._live)

    def masks(self, rows: Seq[PlanRow]) -> tuple[TokenMasks | None, dict[SequenceId, GalleyError]]:
        """Masks of the rows that have a grammar, None if none has, and the sequences that cannot go on."""
        bound = [index for index, row in enumerate(rows) if row.sampling.grammar]
        if not bound:
            return None, {}
        failed: dict[SequenceId, GalleyError] = {}
        bits = np.full((len(bound), self._compiler.mask_words), -1, np.int32)
        for line, index in zip(bits, bound, strict=True):
            row = rows[index]
            try:
                matcher = self._current(row).matcher
                fill(matcher, line)
                _check(matcher)
            except GalleyError as error:
                failed[row.seq] = error
                line.fill(-1)  # a row without tokens would fail the step, for which the others are
                self._live.pop(row.seq, None)
        while len(self._live) > max(self._max_live, len(bound)):
            self._live.popitem(last=False)
        return TokenMasks(tuple(bound), bits), failed

    def advance(self, seq: SequenceId, token: int) -> bool:
        """The sequence got `token` after its mask; gives whether its grammar is complete now.

        Raises InvalidRequest when the grammar cannot go on.
        """
        live = self._live[seq]
        live.matcher.consume_token(token)
        live.output.append(token)
        _check(live.matcher)
        ended: bool = live.matcher.is_stopped()
        return ended

    def forget(self, seqs: Iterable[SequenceId]) -> None:
        """These sequences have ended."""
        for seq in seqs:
            self._live.pop(seq, None)

    def _current(self, row: PlanRow) -> _Live:
        grammar = row.sampling.grammar
        output = list(row.tokens[row.num_prompt : row.start + row.count])
        live = self._live.get(row.seq)
        if live is None or live.grammar != grammar or live.output != output:
            matcher = self._start(grammar)
            matcher.consume_tokens(output)
            _check(matcher)
            live = self._live[row.seq] = _Live(grammar, matcher, output)
        self._live.move_to_end(row.seq)
        return live

    def _start(self, grammar: str) -> LLMatcher:
        compiled = self._compiled.get(grammar)
        if compiled is None:
            compiled = self._compiled[grammar] = self._compiler.compile(grammar)
            while len(self._compiled) > self._max_grammars:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return compiled.deep_copy()


def _check(matcher: LLMatcher) -> None:
    if matcher.is_error():
        raise InvalidRequest(f"the output cannot follow its grammar any further: {explain(matcher)}")
