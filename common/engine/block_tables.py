"""The block tables of an engine's sequences, kept in step with the block pool and the prefix cache.

Knows a sequence's tokens and blocks, not its place in the schedule: who may take blocks, and at whose
cost, is the StepPlanner's choice.
"""

from bisect import bisect_right
from collections.abc import Sequence as Seq

from common.engine.sequence import Sequence
from common.ids import BlockId, SequenceId
from common.kv.block_pool import BlockPool
from common.kv.prefix_cache import PrefixCache


class BlockTables:
    """Fills, extends, registers and releases `Sequence.blocks`. Works without a prefix cache too."""

    def __init__(self, pool: BlockPool, cache: PrefixCache | None) -> None:
        self._pool = pool
        self._cache = cache
        self._num_registered: dict[SequenceId, int] = {}

    def known(self, seq: Sequence) -> list[BlockId]:
        """Blocks that hold the beginning of `seq` already; not taken yet (see PrefixCache.match).

        Empty where the prompt's log probabilities are wanted, which only computing it yields.
        """
        if self._cache is None or seq.sampling.prompt_logprobs is not None:
            return []
        return self._cache.match(seq.tokens, seq.cache_salt, seq.names)

    def uncomputed(self, seq: Sequence) -> int:
        """How many tokens have to be computed before `seq` goes on, as things stand."""
        if seq.blocks:
            return seq.num_uncomputed
        return len(seq.tokens) - self.tokens_in(self.known(seq))

    def tokens_in(self, blocks: list[BlockId]) -> int:
        """How many tokens full `blocks` hold."""
        return len(blocks) * self._pool.block_size

    def fill(self, seq: Sequence, known: list[BlockId], spare: int) -> bool:
        """Take `known` and fresh blocks for all other tokens and the one to come, or nothing at all.

        The token to come counts because the first decode would have to preempt somebody for it at once.
        `spare` blocks stay free besides.
        """
        room = len(seq.tokens) + (0 if seq.hand_over else 1)
        fresh = min(self._pool.blocks_for(room), self._pool.num_blocks) - len(known)
        if not self._pool.can_allocate(fresh + spare, known):
            return False
        seq.blocks = known + self._pool.allocate(fresh, known)
        seq.num_computed = self.tokens_in(known)
        self._num_registered[seq.id] = len(known)
        return True

    def missing(self, seq: Sequence, more: int = 0) -> int:
        """How many blocks the table lacks to hold all tokens of `seq` and `more` others."""
        return max(0, self._pool.blocks_for(len(seq.tokens) + more) - len(seq.blocks))

    def grow(self, seq: Sequence) -> bool:
        """Take the missing blocks, or none."""
        missing = self.missing(seq)
        if missing == 0:
            return True  # as in most steps
        if not self._pool.can_allocate(missing):
            return False
        seq.blocks += self._pool.allocate(missing)
        return True

    def affordable_steps(self, sequences: Seq[Sequence], steps: int) -> int:
        """How many of the next `steps` the free blocks allow, each sequence growing by one token a step."""

        def blocks_taken(step: int) -> int:
            return sum(self.missing(seq, step - 1) for seq in sequences)

        return bisect_right(range(1, steps + 1), self._pool.num_free, key=blocks_taken)

    def register(self, seq: Sequence) -> None:
        """Let others find the full blocks of the first `num_computed` tokens."""
        if self._cache is None:
            return
        start = self._num_registered.get(seq.id, 0)
        if seq.num_computed // self._pool.block_size > start:
            self._num_registered[seq.id] = self._cache.register(
                seq.tokens, seq.cache_salt, seq.blocks, seq.num_computed, start=start, hashes=seq.names
            )

    def release(self, seq: Sequence) -> None:
        """Give the whole table back and forget the sequence."""
        self._num_registered.pop(seq.id, None)
        # A new list, not a cleared one: who was shown the old one keeps what it saw.
        blocks, seq.blocks = seq.blocks, []
        self._pool.release(blocks)
