"""Our engine as a contender: plans as the scheduler makes them, executed by the runner itself.

Uses only what TorchRunner shows to a worker. Knows nothing of how it computes.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import cast

import numpy as np
import numpy.typing as npt

from common.engine.runner import BatchPlan, ModelRunner, PlanRow, StepResult
from common.ids import BlockId, SequenceId
from common.kv.layout import KVLayout
from common.messages.generation import SamplingParams

GREEDY = SamplingParams(max_tokens=1 << 20, seed=0, temperature=0.0, ignore_eos=True)
SCORED = replace(GREEDY, prompt_logprobs=0)
RANDOM_BLOCKS = 16
"""Blocks of random numbers that are made; the pool repeats them."""


@dataclass(slots=True)
class _Sequence:
    seq: SequenceId
    tokens: list[int]
    num_prompt: int
    blocks: tuple[BlockId, ...]

    def row(self, start: int, sampling: SamplingParams = GREEDY) -> PlanRow:
        """A share of a step that computes everything from `start` on, and samples unless it is scored."""
        return PlanRow(
            seq=self.seq,
            tokens=self.tokens,
            start=start,
            count=len(self.tokens) - start,
            num_prompt=self.num_prompt,
            blocks=self.blocks,
            sample=sampling.prompt_logprobs is None,
            choice=0,
            sampling=sampling,
        )


class OurEngine:
    """Implements Contender over a runner whose pool is nobody else's. Greedy sampling, shuffled blocks."""

    def __init__(self, runner: ModelRunner, seed: int = 0) -> None:
        self._runner = runner
        self._layout: KVLayout = runner.layout
        self._rng = random.Random(seed)
        self._steps = count(1)
        self._ids = count(1)
        self._running: list[_Sequence] = []
        self._gone: tuple[SequenceId, ...] = ()
        self._fill_pool(seed)

    def prefill(self, tokens: Sequence[int]) -> None:
        self._execute([self._new(tokens).row(0)])

    def logprobs(self, tokens: Sequence[int]) -> list[float]:
        """The log probability of every token but the first, from nothing cached."""
        one = self._new(tokens)
        scored = self._run([one.row(0, SCORED)]).scored[one.seq]
        return [each.logprob for each in scored]

    def fill(self, batch: int, context: int) -> None:
        self._end_all()
        tables = self._tables(batch, context + 2 * self._layout.block_size)
        self._running = [
            _Sequence(SequenceId(next(self._ids)), self._prompt(context), context, table) for table in tables
        ]

    def rewind(self) -> None:
        for one in self._running:
            del one.tokens[one.num_prompt :]

    def step(self) -> None:
        result = self._execute([one.row(len(one.tokens) - 1) for one in self._running])
        for one in self._running:
            one.tokens.append(result[one.seq])

    def _new(self, tokens: Sequence[int]) -> _Sequence:
        """The only sequence there is from now on, nothing of it computed."""
        self._end_all()
        (blocks,) = self._tables(1, len(tokens))
        one = _Sequence(SequenceId(next(self._ids)), list(tokens), len(tokens), blocks)
        self._running = [one]
        return one

    def _execute(self, rows: Sequence[PlanRow]) -> dict[SequenceId, int]:
        return {seq: sampled.token for seq, sampled in self._run(rows).tokens.items()}

    def _run(self, rows: Sequence[PlanRow]) -> StepResult:
        plan = BatchPlan(next(self._steps), tuple(rows), self._gone)
        self._gone = ()
        return self._runner.execute(plan)

    def _end_all(self) -> None:
        self._gone = (*self._gone, *(one.seq for one in self._running))
        self._running = []

    def _tables(self, batch: int, num_tokens: int) -> list[tuple[BlockId, ...]]:
        """Block tables of `batch` sequences, scattered over the pool as after hours of service."""
        each = self._layout.blocks_for(num_tokens)
        drawn = self._rng.sample(range(self._runner.buffer.num_blocks), batch * each)
        return [tuple(map(BlockId, drawn[i * each : (i + 1) * each])) for i in range(batch)]

    def _prompt(self, length: int) -> list[int]:
        return [self._rng.randrange(self._runner.vocab_size) for _ in range(length)]

    def _fill_pool(self, seed: int) -> None:
        samples = _random_blocks(self._layout, seed)
        for number in range(self._runner.buffer.num_blocks):
            block = cast(memoryview, self._runner.buffer.block(BlockId(number)))
            np.frombuffer(block, np.uint8)[:] = samples[number % len(samples)]


def blocks_needed(block_size: int, sequences: Sequence[tuple[int, int]]) -> int:
    """Blocks of a pool for the largest of some (batch, tokens each), with room to go on."""
    return max(batch * (-(-tokens // block_size) + 2) for batch, tokens in sequences)


def _random_blocks(layout: KVLayout, seed: int) -> npt.NDArray[np.uint8]:
    """Normally distributed bfloat16, `[RANDOM_BLOCKS, block_bytes]`: the upper halves of float32."""
    if layout.dtype != "bfloat16":
        raise ValueError(f"random KV is made for bfloat16, not for {layout.dtype}")
    numbers = np.random.default_rng(seed).standard_normal(
        (RANDOM_BLOCKS, layout.block_bytes // 2), dtype=np.float32
    )
    return (numbers.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
