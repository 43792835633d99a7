"""Which blocks already hold the KV of a prompt's beginning: named blocks of a BlockPool.

What a name is, messages/block_hash.py says. Knows nothing of sequences and of who else is told of the blocks.
"""

from collections.abc import Sequence as Seq

from common.ids import BlockId
from common.kv.block_pool import BlockPool
from common.messages.block_hash import BlockHasher


class PrefixCache:
    """Looks prefixes up in `pool` and names computed blocks there. `fingerprint` covers layout and weights.

    `hashes`, where taken, is the caller's memo for one sequence: the hashes of its first full blocks,
    extended in place as far as needed. It stays valid while tokens are only appended.
    """

    def __init__(self, pool: BlockPool, fingerprint: str) -> None:
        self._pool = pool
        self._hasher = BlockHasher(fingerprint, pool.block_size)

    def match(self, tokens: Seq[int], salt: str = "", hashes: list[bytes] | None = None) -> list[BlockId]:
        """Blocks that hold the longest known prefix of `tokens`, in order; changes nothing in the pool.

        Never covers the last token, which must be computed to get logits. The blocks are the caller's only
        after `pool.retain` or `pool.allocate(..., sharing=...)`, before anything else is allocated.
        """
        return self.find(self._chain(tokens, salt, (len(tokens) - 1) // self._pool.block_size, hashes))

    def names(self, tokens: Seq[int], salt: str = "", hashes: list[bytes] | None = None) -> list[bytes]:
        """The hashes of all full blocks of `tokens`, in order."""
        return self._chain(tokens, salt, len(tokens) // self._pool.block_size, hashes)

    def find(self, names: Seq[bytes]) -> list[BlockId]:
        """Blocks that hold the first of `names`, up to the first that none holds; on the terms of `match`."""
        blocks: list[BlockId] = []
        for content in names:
            block = self._pool.find(content)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def register(
        self,
        tokens: Seq[int],
        salt: str,
        blocks: Seq[BlockId],
        num_computed: int,
        *,
        start: int = 0,
        hashes: list[bytes] | None = None,
    ) -> int:
        """Name the full ones of `blocks`, whose first `num_computed` tokens' KV is written.

        The caller holds the blocks and never writes those tokens again. `start` skips that many blocks which
        were registered before; returns the number of blocks registered now, to be the next `start`.
        """
        full = num_computed // self._pool.block_size
        if full > start:
            contents = self._chain(tokens, salt, full, hashes)
            for block, content in zip(blocks[start:full], contents[start:], strict=True):
                self._pool.remember(block, content)
        return full

    def _chain(self, tokens: Seq[int], salt: str, count: int, hashes: list[bytes] | None) -> list[bytes]:
        chain = [] if hashes is None else hashes
        self._hasher.extend(chain, tokens, salt, count)
        return chain[:count]
