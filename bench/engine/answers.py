"""Greedy answers to a set of prompts, computed from KV that may have been encoded and decoded before.

Drives a runner as a prefill and a decode would, all prompts in one batch. Knows nothing of who compares what.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count

import numpy as np
import numpy.typing as npt

from common.engine.runner import BatchPlan, ModelRunner, PlanRow, SampledToken
from common.ids import BlockId, SequenceId
from common.kv.buffer import Buffer
from common.kv.codec import KVCodec
from common.messages.generation import SamplingParams

GREEDY = SamplingParams(max_tokens=1 << 20, seed=0, temperature=0.0, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Answer:
    """The tokens from the second on, and the log probability of every token of the vocabulary for the second:
    the first comes from the prefill, whose KV was not sent anywhere."""

    tokens: tuple[int, ...]
    logprobs: npt.NDArray[np.float32]


@dataclass(slots=True)
class _Prompt:
    tokens: list[int]
    blocks: tuple[BlockId, ...]
    first: int = 0


class Answers:
    """The prompts' KV lies in the runner's pool, which nobody else uses."""

    def __init__(self, runner: ModelRunner, prompts: Sequence[Sequence[int]], num_tokens: int) -> None:
        """Computes the prompts. Answers have `num_tokens` tokens from the second on."""
        self._runner = runner
        self._num_tokens = num_tokens
        self._steps = count(1)
        self._prompts: list[_Prompt] = []
        free = count()
        for tokens in prompts:
            needed = runner.layout.blocks_for(len(tokens) + 1 + num_tokens)
            prompt = _Prompt(list(tokens), tuple(BlockId(next(free)) for _ in range(needed)))
            prompt.first = self._execute([(prompt, prompt.tokens, 0)], GREEDY)[0].token
            self._prompts.append(prompt)

    async def encoded(self, codec: KVCodec) -> dict[BlockId, Buffer]:
        """Every block with KV of a prompt, as it would travel."""
        return {block: await codec.encode(block) for block in self._filled()}

    async def received(self, codec: KVCodec, blocks: dict[BlockId, Buffer]) -> None:
        """Put what `encoded` gave in the place of the prompts' KV."""
        for block, data in blocks.items():
            await codec.decode(data, block)

    def decode(self) -> list[Answer]:
        """The answers, from the prompts' KV as it lies there now."""
        texts = [[*prompt.tokens, prompt.first] for prompt in self._prompts]
        logprobs: list[npt.NDArray[np.float32]] = []
        for step in range(self._num_tokens):
            rows = [(p, text, len(text) - 1) for p, text in zip(self._prompts, texts, strict=True)]
            whole = replace(GREEDY, logprobs=self._runner.vocab_size) if not step else GREEDY
            for text, sampled in zip(texts, self._execute(rows, whole), strict=True):
                text.append(sampled.token)
                if sampled.logprobs is not None:
                    by_token = dict(sampled.logprobs.top)
                    logprobs.append(np.array([by_token[token] for token in sorted(by_token)], np.float32))
        ends = [tuple(text[len(p.tokens) + 1 :]) for p, text in zip(self._prompts, texts, strict=True)]
        return [Answer(tokens, one) for tokens, one in zip(ends, logprobs, strict=True)]

    def _filled(self) -> list[BlockId]:
        layout = self._runner.layout
        return [block for p in self._prompts for block in p.blocks[: layout.blocks_for(len(p.tokens))]]

    def _execute(
        self, rows: Sequence[tuple[_Prompt, list[int], int]], sampling: SamplingParams
    ) -> list[SampledToken]:
        """One step: for each prompt, what follows its text, whose KV is there up to `start`."""
        plan = BatchPlan(
            next(self._steps),
            tuple(
                PlanRow(
                    seq=SequenceId(number),
                    tokens=text,
                    start=start,
                    count=len(text) - start,
                    num_prompt=len(prompt.tokens),
                    blocks=prompt.blocks,
                    sample=True,
                    choice=0,
                    sampling=sampling,
                )
                for number, (prompt, text, start) in enumerate(rows)
            ),
        )
        result = self._runner.execute(plan)
        return [result.tokens[row.seq] for row in plan.rows]
