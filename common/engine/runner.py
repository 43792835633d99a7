"""The border between scheduling and arithmetic: what a step is, and what came of it.

Plain data in and out, so that a runner may live in a thread, in another rank, or be a fake. Knows
nothing of asyncio and torch. Implementations: runner_torch.py, runner_fake.py.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

from common.errors import GalleyError
from common.ids import BlockId, SequenceId
from common.kv.buffer import KVBuffer
from common.kv.codec import Codecs
from common.kv.layout import KVLayout
from common.messages.generation import SamplingParams
from common.messages.stream import TokenLogprobs


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One sequence's share of a step: compute tokens[start : start + count].

    `tokens` is prompt + output up to at least start + count (its growing tail is not to be looked at beyond
    `start + count`). `num_prompt` of them are the request's own prompt, the rest its output. `blocks` is
    the block table covering start + count tokens. With `sample`, the last computed position yields a token,
    whose position is start + count, counted from the prompt's start.
    """

    seq: SequenceId
    tokens: Seq[int]
    start: int
    count: int
    num_prompt: int
    blocks: tuple[BlockId, ...]
    sample: bool
    choice: int
    sampling: SamplingParams

    @property
    def num_prompt_tokens(self) -> int:
        """How many of the computed tokens belong to the request's own prompt."""
        return max(0, min(self.start + self.count, self.num_prompt) - self.start)

    @property
    def scored(self) -> range:
        """Positions of the prompt tokens whose log probabilities this share yields; empty unless asked for.

        The token at a position is foretold by the one before, so the prompt's first has none.
        """
        if self.sampling.prompt_logprobs is None:
            return range(0)
        return range(self.start + 1, min(self.start + self.count + 1, self.num_prompt))


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """One step. `step` numbers plans from 1; rows are in scheduling order. Never empty.

    `gone` names sequences that ended since the plan before: what is kept for them may be dropped.
    """

    step: int
    rows: tuple[PlanRow, ...]
    gone: tuple[SequenceId, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(row.count for row in self.rows)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """`ends`: the sequence's grammar is complete with this token, so that nothing can follow."""

    token: int
    logprobs: TokenLogprobs | None = None
    ends: bool = False


@dataclass(frozen=True, slots=True)
class StepResult:
    """`tokens` has an entry for every row of the plan that was to be sampled, but for those in `failed`.

    `failed` names sequences that cannot go on, each by no fault of the others of its step. `scored` has the
    log probabilities at PlanRow.scored, where there are any.
    """

    step: int
    tokens: dict[SequenceId, SampledToken] = field(default_factory=dict)
    failed: dict[SequenceId, GalleyError] = field(default_factory=dict)
    scored: dict[SequenceId, tuple[TokenLogprobs, ...]] = field(default_factory=dict)


class ModelRunner(Protocol):
    """Executes plans one after another, in the order given. Blocking; called in one thread only."""

    @property
    def layout(self) -> KVLayout: ...

    @property
    def buffer(self) -> KVBuffer: ...

    @property
    def kv_codecs(self) -> Codecs:
        """How blocks of the buffer can be made smaller for the wire, by name; empty where they cannot."""
        ...

    @property
    def max_model_len(self) -> int:
        """Longest prompt + output, in tokens, that the model's positions allow."""
        ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def weights_fingerprint(self) -> str: ...

    def execute(self, plan: BatchPlan) -> StepResult:
        """One forward pass over all rows: writes their KV into the pool, then samples.

        Raises StepFailed when the arithmetic itself fails.
        """
        ...


class StepExecutor(Protocol):
    """Runs a plan off the event loop: a thread around a ModelRunner, or virtual time around a fake."""

    async def execute(self, plan: BatchPlan) -> StepResult:
        """Raises StepFailed."""
        ...

    async def close(self) -> None: ...
