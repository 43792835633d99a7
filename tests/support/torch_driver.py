"""Drives a TorchRunner with hand-made plans, without a scheduler: its own blocks, its own chunks."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from common.engine.runner import BatchPlan, PlanRow, SampledToken
from common.engine.runner_torch import TorchRunner
from common.ids import BlockId, SequenceId
from common.messages.generation import SamplingParams
from common.messages.stream import TokenLogprobs

GREEDY = SamplingParams(max_tokens=1, seed=0, temperature=0.0)


@dataclass(eq=False)
class Text:
    """A sequence under way: `computed` of its tokens are in `blocks`."""

    id: SequenceId
    tokens: list[int]
    num_prompt: int
    sampling: SamplingParams
    computed: int = 0
    blocks: list[BlockId] = field(default_factory=list)
    sampled: list[SampledToken] = field(default_factory=list)
    scores: list[TokenLogprobs] = field(default_factory=list)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt :]


class Driver:
    """Hands out blocks in a scrambled order and never takes one back, unless told to."""

    def __init__(self, runner: TorchRunner, seed: int = 0) -> None:
        self.runner = runner
        self._free = [BlockId(i) for i in range(runner.buffer.num_blocks)]
        random.Random(seed).shuffle(self._free)
        self._numbers = 0

    def text(self, prompt: Sequence[int], sampling: SamplingParams = GREEDY) -> Text:
        self._numbers += 1
        return Text(SequenceId(self._numbers), list(prompt), len(prompt), sampling)

    def free(self, text: Text) -> None:
        self._free.extend(text.blocks)
        text.blocks.clear()

    def step(self, shares: Iterable[tuple[Text, int]]) -> None:
        """Advance each text by so many tokens; one that then has none left is sampled."""
        shares = list(shares)
        rows = tuple(self._row(text, count) for text, count in shares)
        result = self.runner.execute(BatchPlan(1, rows))
        assert set(result.tokens) == {row.seq for row in rows if row.sample}
        for text, count in shares:
            text.computed += count
            text.scores += result.scored.get(text.id, ())
            if text.id in result.tokens:
                text.sampled.append(result.tokens[text.id])
                text.tokens.append(result.tokens[text.id].token)

    def run(self, texts: Sequence[Text], num_output: int, chunk: int = 1 << 30) -> list[list[int]]:
        """Compute all in common steps, at most `chunk` tokens of each a step, to `num_output` tokens."""
        while unfinished := [text for text in texts if len(text.output) < num_output]:
            self.step((text, min(chunk, len(text.tokens) - text.computed)) for text in unfinished)
        return [text.output for text in texts]

    def _row(self, text: Text, count: int) -> PlanRow:
        end = text.computed + count
        while len(text.blocks) < self.runner.layout.blocks_for(end):
            text.blocks.append(self._free.pop())
        return PlanRow(
            seq=text.id,
            tokens=text.tokens,
            start=text.computed,
            count=count,
            num_prompt=text.num_prompt,
            blocks=tuple(text.blocks),
            sample=end == len(text.tokens),
            choice=0,
            sampling=text.sampling,
        )
