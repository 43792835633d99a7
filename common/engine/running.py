"""Those who hold blocks: in which order they go, who has to give way, and how much they will grow.

Knows ranks and lengths. Who takes blocks from whom, and what is in a step, is the StepPlanner's choice.
"""

from bisect import insort
from collections.abc import Iterator
from typing import Final

from common.engine.block_tables import BlockTables
from common.engine.entry import Entry, State, by_rank
from common.engine.limits import Limits
from common.engine.ordering import Rank
from common.engine.sequence import Sequence

HEADROOM_TOKENS: Final = 64
"""How far ahead the growth of the running is kept free, in tokens of each."""


class RunningSet:
    """Entries with blocks, sorted by rank. May be changed while one iterates over it."""

    def __init__(self, tables: BlockTables, limits: Limits, headroom_tokens: int) -> None:
        self._tables = tables
        self._limits = limits
        self._headroom_tokens = headroom_tokens
        self._entries: list[Entry] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.copy())

    def add(self, entry: Entry) -> None:
        insort(self._entries, entry, key=by_rank)

    def remove(self, entry: Entry) -> None:
        self._entries.remove(entry)

    def move(self, entry: Entry, rank: Rank) -> None:
        """Give an entry another rank."""
        self.remove(entry)
        entry.rank = rank
        self.add(entry)

    @property
    def num_tokens(self) -> int:
        """Tokens whose KV is held."""
        return sum(entry.seq.num_computed for entry in self._entries)

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens still to be computed before their sequences decode."""
        return sum(entry.seq.num_uncomputed for entry in self._entries if not entry.is_decoding)

    @property
    def headroom(self) -> int:
        """Blocks that all of them together will want soon; whoever comes new leaves these free.

        Or the youngest would be preempted, with its prompt just computed, whenever somebody needs one block
        more (docs/decisions/0014-the-order-of-sequences.md has figures).
        """
        return sum(self.growth(entry.seq) for entry in self._entries)

    def growth(self, seq: Sequence) -> int:
        """Blocks that `seq` lacks for its next `headroom_tokens` tokens, or for those up to its end."""
        if seq.hand_over:
            return 0
        left = self._limits.length(seq) - 1 - len(seq.tokens)  # the last token needs no KV
        return self._tables.missing(seq, max(0, min(left, self._headroom_tokens)))

    def victim_for(self, entry: Entry) -> Entry | None:
        """Who loses its blocks so that `entry` can grow: the last in rank, if that is after `entry`."""
        victim = next((other for other in reversed(self._entries) if other.may_be_preempted), None)
        return victim if victim and victim.rank > entry.rank else None

    def steady_steps(self) -> int:
        """How many coming steps can give each of them one token, with the blocks there are, and end nobody
        before the last; 0 if one of them is not decoding."""
        if any(entry.state is not State.RUNNING or not entry.is_decoding for entry in self._entries):
            return 0
        sequences = [entry.seq for entry in self._entries]
        steps = min((self._limits.length(seq) - len(seq.tokens) for seq in sequences), default=0)
        return self._tables.affordable_steps(sequences, steps)
