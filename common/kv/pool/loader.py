"""Brings prefixes that are in the KV pool into the prefix cache, before somebody would compute them.

What is loaded ends as cached blocks, found by whoever looks the prefix up and evicted like all others: so
nothing is held for a request, and what is gone by then is computed. Knows nothing of sequences.
"""

import asyncio
from collections.abc import Callable
from collections.abc import Sequence as Seq

from common.kv.block_pool import BlockPool
from common.kv.pool.link import PoolLink


class PrefixLoader:
    """`spare` says how many blocks of `pool` may be used for loading at the moment."""

    def __init__(self, link: PoolLink, pool: BlockPool, min_blocks: int, spare: Callable[[], int]) -> None:
        """Fewer than `min_blocks` are not loaded: computing them takes no longer."""
        self._link = link
        self._pool = pool
        self._min_blocks = max(1, min_blocks)
        self._spare = spare
        self._fetching: dict[bytes, asyncio.Event] = {}
        """Who loads from this block on; others with the same prefix wait for that."""

    def missing(self, names: Seq[bytes]) -> Seq[bytes]:
        """Those of `names` that `load` would ask the pool for; none where that is not worth it now."""
        here = next((i for i, name in enumerate(names) if self._pool.find(name) is None), len(names))
        missing = names[here:]
        return missing if len(missing) >= self._min_blocks and self._link.usable else ()

    async def load(self, names: Seq[bytes]) -> None:
        """Have the pool's part of `names` in the prefix cache, as far as there is room.

        Takes no longer than two calls of the pool, or four where another loads the same prefix.
        """
        missing = self.missing(names)
        if missing and (other := self._fetching.get(missing[0])):
            await other.wait()
            missing = self.missing(names)
        if not missing:
            return
        first, done = missing[0], asyncio.Event()
        self._fetching.setdefault(first, done)
        try:
            await self._fetch(missing)
        finally:
            done.set()
            if self._fetching.get(first) is done:
                del self._fetching[first]

    async def _fetch(self, names: Seq[bytes]) -> None:
        found = await self._link.match(names)
        names = names[: min(found, max(0, self._spare()))]
        if not names:
            return
        blocks = self._pool.allocate(len(names))
        try:
            loaded = await self._link.load(names, blocks)
            for block, name in zip(blocks[:loaded], names[:loaded], strict=True):
                self._pool.remember(block, name)
        finally:
            self._pool.release(blocks)
