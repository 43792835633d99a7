"""Which blocks already hold the KV of a prompt's beginning: content hashes over a BlockPool.

A block is named by a BLAKE2b hash chained over (parent hash, its tokens) and keyed by model fingerprint and
cache salt, so that equal names mean equal KV and tenants with different salts never meet. The idea of
hashing full blocks with their prefix is vLLM's automatic prefix caching. Knows nothing of sequences.
"""

import hashlib
import struct
from collections.abc import Sequence as Seq

from common.ids import BlockId
from common.kv.block_pool import BlockPool


class PrefixCache:
    """Looks prefixes up in `pool` and names computed blocks there. `fingerprint` covers layout and weights.

    `hashes`, where taken, is the caller's memo for one sequence: the hashes of its first full blocks,
    extended in place as far as needed. It stays valid while tokens are only appended.
    """

    def __init__(self, pool: BlockPool, fingerprint: str) -> None:
        self._pool = pool
        self._fingerprint = fingerprint.encode()

    def match(self, tokens: Seq[int], salt: str = "", hashes: list[bytes] | None = None) -> list[BlockId]:
        """Blocks that hold the longest known prefix of `tokens`, in order; changes nothing in the pool.

        Never covers the last token, which must be computed to get logits. The blocks are the caller's only
        after `pool.retain` or `pool.allocate(..., sharing=...)`, before anything else is allocated.
        """
        blocks: list[BlockId] = []
        for content in self._chain(tokens, salt, (len(tokens) - 1) // self._pool.block_size, hashes):
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
        if len(chain) < count:
            size = self._pool.block_size
            key = hashlib.blake2b(salt.encode(), key=self._fingerprint[:64], digest_size=32).digest()
            pack = struct.Struct(f"<{size}q").pack
            for start in range(len(chain) * size, count * size, size):
                parent = chain[-1] if chain else b""
                block = pack(*tokens[start : start + size])
                chain.append(hashlib.blake2b(parent + block, key=key, digest_size=16).digest())
        return chain[:count]
