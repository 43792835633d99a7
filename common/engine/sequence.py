"""One choice of one attempt inside an engine: its tokens, how far they are computed, and its blocks.

Plain mutable state, owned by the Scheduler while inside it. Knows nothing of how it is scheduled.
"""

from dataclasses import dataclass, field

from common.ids import AttemptKey, BlockId, SequenceId
from common.messages.generation import SLO, SamplingParams


@dataclass(slots=True, eq=False)
class Sequence:
    """`tokens` = prompt + output; the first `num_computed` of them have their KV in `blocks`.

    Prefill, chunked prefill, decode, recompute after preemption and resuming a migrated attempt are all
    the same move: raise num_computed towards len(tokens), sample when it gets there (design.md 4.2).

    `num_prompt` counts the request's own prompt tokens: output index 0 is tokens[num_prompt], also for a
    resumed attempt, whose earlier output is part of `tokens` from the start. `num_cached` is how many
    tokens the prefix cache gave at admission, and `admitted` when it last got its first blocks. `hand_over`
    ends the sequence here after one sampled token, for a decode instance to go on. All times are on this
    process's clock; arrival is when the request reached the gateway, so age survives re-routing, and
    `slo.ttft_s` counts from there.
    """

    id: SequenceId
    key: AttemptKey
    tokens: list[int]
    num_prompt: int
    sampling: SamplingParams
    arrival: float
    deadline: float
    priority: int = 0
    slo: SLO | None = None
    cache_salt: str = ""
    hand_over: bool = False
    num_computed: int = 0
    num_cached: int = 0
    admitted: float | None = None
    blocks: list[BlockId] = field(default_factory=list)
    names: list[bytes] = field(default_factory=list)
    """Of its first full blocks, as far as somebody needed them: the PrefixCache's memo."""

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_uncomputed(self) -> int:
        return len(self.tokens) - self.num_computed
