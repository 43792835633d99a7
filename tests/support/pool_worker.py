"""A worker's side of a KV pool without the worker: block pool, memory, and what loads and publishes."""

import asyncio

from common.clock import LoopClock
from common.engine.runner_fake import FakeBuffer
from common.ids import BlockId
from common.kv.block_pool import BlockPool
from common.kv.pool.link import PoolLink
from common.kv.pool.loader import PrefixLoader
from common.kv.pool.publisher import PoolPublisher
from tests.support.memory_pool import MemoryPool

BLOCK_BYTES = 64


def name(number: int) -> bytes:
    return number.to_bytes(16, "big")


def content(number: int) -> bytes:
    return bytes([number % 251]) * BLOCK_BYTES


class PoolWorker:
    """Over `store`; block number n of the text everybody knows is called name(n) and holds content(n)."""

    def __init__(self, store: MemoryPool, num_blocks: int = 32, *, headroom: int = 0, max_blocks: int = 16):
        self.pool = BlockPool(num_blocks, block_size=16)
        self.buffer = FakeBuffer(num_blocks, BLOCK_BYTES)
        self.link = PoolLink(store, self.buffer, LoopClock(asyncio.get_running_loop()))
        self.loader = PrefixLoader(self.link, self.pool, 1, lambda: self.pool.num_free - headroom)
        self.dropped = 0
        self.publisher = PoolPublisher(self.link, self.pool, max_blocks, self._drop)

    def compute(self, *numbers: int) -> list[BlockId]:
        """Used blocks of that content, named."""
        blocks = self.pool.allocate(len(numbers))
        for block, number in zip(blocks, numbers, strict=True):
            self.buffer.block(block)[:] = content(number)
            self.pool.remember(block, name(number))
        return blocks

    def holds(self, *numbers: int) -> bool:
        """Whether all of them can be found, undamaged."""
        blocks = [self.pool.find(name(number)) for number in numbers]
        return all(
            block is not None and bytes(self.buffer.block(block)) == content(number)
            for block, number in zip(blocks, numbers, strict=True)
        )

    def _drop(self, blocks: int) -> None:
        self.dropped += blocks


def stored(*numbers: int) -> dict[bytes, bytes]:
    """For MemoryPool.objects."""
    return {name(number): content(number) for number in numbers}
