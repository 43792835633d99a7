"""A sequence's place in the schedule: its state, its rank, and what its last preemption cost.

Plain state that the Scheduler, its parts and the decode's handoff queue share; what changes it is told in the
Scheduler's table. Knows nothing of why.
"""

from dataclasses import dataclass
from enum import Enum, auto

from common.engine.ordering import Rank
from common.engine.sequence import Sequence


class State(Enum):
    WAITING = auto()
    RUNNING = auto()
    IN_FLIGHT = auto()
    DOOMED = auto()


@dataclass(slots=True, eq=False)
class Entry:
    """`senior`: its turn came by age (WaitingLine). `num_lost`: computed tokens that a preemption cost."""

    seq: Sequence
    rank: Rank
    state: State = State.WAITING
    senior: bool = False
    num_lost: int = 0

    @property
    def is_decoding(self) -> bool:
        seq = self.seq
        computed = seq.num_computed
        return computed >= seq.num_prompt and len(seq.tokens) - computed == 1 and not seq.hand_over

    @property
    def may_be_preempted(self) -> bool:
        return self.state is State.RUNNING and not self.seq.hand_over


def by_rank(entry: Entry) -> Rank:
    """Sort key: who goes first."""
    return entry.rank
