"""What a step is made of: the order of prefills and decodes, and how prompts are cut.

Pure choices, asked by the Scheduler; knows nothing of sequences, blocks and time.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

from common.errors import ConfigError

Phase = Literal["prefill", "decode"]


@dataclass(slots=True)
class TokenBudget:
    """What is left of one step: tokens to compute and sequences to do it for."""

    tokens: int
    sequences: int

    @property
    def exhausted(self) -> bool:
        return self.tokens <= 0 or self.sequences <= 0

    def spend(self, tokens: int) -> None:
        """One more sequence computes `tokens` tokens."""
        self.tokens -= tokens
        self.sequences -= 1


class SchedulingPolicy(Protocol):
    """`phases` in the order they are served; `mixed` lets one step serve both."""

    @property
    def phases(self) -> tuple[Phase, Phase]: ...

    @property
    def mixed(self) -> bool: ...

    def chunk(self, uncomputed: int, left: int, first: bool) -> int:
        """How many of a prompt's `uncomputed` tokens this step takes, at most `left`; 0: none in this step.

        `first` tells that the step is still empty; then the answer is above 0.
        """
        ...


@dataclass(frozen=True, slots=True)
class PrefillFirst:
    """Whole prompts before any decode, as in Orca and the first vLLM: best TTFT, decodes stall meanwhile.

    Decodes run in the steps that have no prompt to compute. Only a prompt above the whole budget is cut.
    """

    phases: ClassVar[tuple[Phase, Phase]] = ("prefill", "decode")
    mixed: ClassVar[bool] = False

    def chunk(self, uncomputed: int, left: int, first: bool) -> int:
        if uncomputed > left and not first:
            return 0
        return min(uncomputed, left)


@dataclass(frozen=True, slots=True)
class DecodeFirst:
    """Every decode in every step, prompts in chunks with what is left (Sarathi-Serve, stall-free batching).

    `chunk_tokens` bounds one prompt's share of a step; the budget bounds the step, and with it the TPOT.
    """

    chunk_tokens: int
    phases: ClassVar[tuple[Phase, Phase]] = ("decode", "prefill")
    mixed: ClassVar[bool] = True

    def chunk(self, uncomputed: int, left: int, first: bool) -> int:  # noqa: ARG002 (part of the protocol)
        return min(uncomputed, left, self.chunk_tokens)


def make_policy(name: str, chunk_tokens: int) -> SchedulingPolicy:
    """The policy of that name. Raises ConfigError for a name that is none."""
    if name == "prefill_first":
        return PrefillFirst()
    if name == "decode_first":
        return DecodeFirst(chunk_tokens)
    raise ConfigError(f"policy {name!r}: use prefill_first or decode_first", param="policy")
