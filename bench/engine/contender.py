"""How two engines are timed side by side: in turn, a little of each, medians of all.

Knows nothing of either engine.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol

from bench.engine.cells import Cell, Prefill

SHORTEST_ROUND = 3
"""Prefills or steps that a round has at least, however slow they are."""
LONGEST_ROUND = 16


class Contender(Protocol):
    """An engine that computes one prompt, or one step of a batch, on demand."""

    def prefill(self, tokens: Sequence[int]) -> None:
        """Compute one prompt from nothing and sample its next token."""
        ...

    def fill(self, batch: int, context: int) -> None:
        """Make `batch` sequences of `context` tokens each, with random keys and values."""
        ...

    def rewind(self) -> None:
        """Cut all sequences back to the length that `fill` gave them."""
        ...

    def step(self) -> None:
        """One token more for every sequence, sampled from what the one before gave."""
        ...


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to look: rounds in turn, and seconds after which a round is long enough."""

    rounds: int
    round_s: float


def compare(
    cell: Cell, contenders: Sequence[Contender], tokens: Sequence[int], effort: Effort
) -> list[float]:
    """Median seconds of one prefill of `tokens`, or of one decode step, for each contender."""
    begins, works = [], []
    for contender in contenders:
        begin, work = _task(cell, contender, tokens)
        begin()
        for _ in range(2):  # first times: memory is touched, kernels are chosen
            work()
        begins.append(begin)
        works.append(work)
    times: list[list[float]] = [[] for _ in contenders]
    for _ in range(effort.rounds):
        for own, begin, work in zip(times, begins, works, strict=True):
            begin()
            own += _round(work, effort.round_s)
    return [median(own) for own in times]


def _task(
    cell: Cell, contender: Contender, tokens: Sequence[int]
) -> tuple[Callable[[], None], Callable[[], None]]:
    """What to do before a round, and what to time in it."""
    if isinstance(cell, Prefill):
        return (lambda: None), (lambda: contender.prefill(tokens))
    # A round's steps lie around the context that the cell names.
    contender.fill(cell.batch, cell.context - LONGEST_ROUND // 2)
    return contender.rewind, contender.step


def _round(work: Callable[[], None], enough_s: float) -> list[float]:
    times: list[float] = []
    while len(times) < SHORTEST_ROUND or (len(times) < LONGEST_ROUND and sum(times) < enough_s):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return times
