"""Publishes computed blocks to the KV pool, beside what the worker does for its requests.

Knows nothing of sequences: a block has a name once the prefix cache has one for it (kv/prefix_cache.py).
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Final

from common.ids import BlockId
from common.kv.block_pool import BlockPool
from common.kv.pool.link import PoolLink

BATCH: Final = 32
"""Blocks in one call: few calls, and blocks come free while later ones are published."""
REMEMBERED: Final = 1 << 16
"""Names of which we know that they were published; older ones are published again, which changes nothing."""


class PoolPublisher:
    """Blocks in the queue are held here. `dropped` hears how many blocks were not published after all.

    Which is no loss but to others: the newest when the queue is full, all while the pool is left alone.
    """

    def __init__(
        self, link: PoolLink, pool: BlockPool, max_blocks: int, dropped: Callable[[int], None]
    ) -> None:
        """At most `max_blocks` are in the queue."""
        self._link = link
        self._pool = pool
        self._max_blocks = max_blocks
        self._dropped = dropped
        self._queue: deque[tuple[bytes, BlockId]] = deque()
        self._published: OrderedDict[bytes, None] = OrderedDict()
        self._filled = asyncio.Event()

    def offer(self, blocks: Seq[BlockId], num_cached: int = 0) -> None:
        """Publish `blocks`, in order; the prefix cache had the first `num_cached`, the others are new.

        Of the former only those that were not published from here before. They have to be used or cached,
        and are not written any more. Unnamed ones are copies of others, which have been offered.
        """
        wanted = []
        for index, block in enumerate(blocks):
            name = self._pool.name_of(block)
            if name is not None and (index >= num_cached or name not in self._published):
                wanted.append((name, block))
        room = self._max_blocks - len(self._queue) if self._link.usable else 0
        taken = wanted[: max(0, room)]
        if len(taken) < len(wanted):
            self._dropped(len(wanted) - len(taken))
        if taken:
            self._pool.retain(block for _, block in taken)
            self._queue.extend(taken)
            self._filled.set()

    async def run(self) -> None:
        """Publish what is offered; at the end, by cancellation, nothing is held any more."""
        try:
            while True:
                while self._queue:
                    await self._publish([self._queue.popleft() for _ in range(min(BATCH, len(self._queue)))])
                self._filled.clear()
                await self._filled.wait()
        finally:
            self._pool.release([block for _, block in self._queue])
            self._queue.clear()

    async def _publish(self, batch: list[tuple[bytes, BlockId]]) -> None:
        names, blocks = [name for name, _ in batch], [block for _, block in batch]
        try:
            done = await self._link.publish(names, blocks)
        finally:
            self._pool.release(blocks)
        for name in names[:done]:
            self._published[name] = None
            self._published.move_to_end(name)
        while len(self._published) > REMEMBERED:
            self._published.popitem(last=False)
        if done < len(batch):
            self._dropped(len(batch) - done)
