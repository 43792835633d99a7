"""A KV pool for blocks in a GPU's memory: they go by way of host memory, which is all that stores know.

Knows nothing of stores and of who wants a block.
"""

import asyncio
from collections.abc import Awaitable, Callable
from collections.abc import Sequence as Seq
from typing import Final

import torch
from torch import Tensor

from common.errors import KVPoolUnavailable
from common.ids import BlockId
from common.kv.buffer import Buffer, KVBuffer
from common.kv.pool.base import KVPool

BATCH: Final = 32
"""Blocks that are in host memory at once, for each call."""

_Move = Callable[[Seq[bytes], Seq[Tensor]], Awaitable[int]]


def staged(pool: KVPool, buffer: KVBuffer, timeout_s: float) -> KVPool:
    """`pool` as it can be used with the blocks of `buffer`, wherever they lie; `timeout_s` is the pool's."""
    block = buffer.block(BlockId(0))
    return StagedPool(pool, buffer.block_bytes, timeout_s) if isinstance(block, Tensor) else pool


class StagedPool:
    """A KVPool whose blocks are uint8 tensors on any device.

    Batches follow one another within the pool's timeout; the one that is under way then may take as long
    again.
    """

    def __init__(self, pool: KVPool, block_bytes: int, timeout_s: float) -> None:
        self._pool = pool
        self._block_bytes = block_bytes
        self._timeout_s = timeout_s

    async def match(self, names: Seq[bytes]) -> int:
        return await self._pool.match(names)

    async def load(self, names: Seq[bytes], blocks: Seq[Buffer]) -> int:
        return await self._in_batches(self._load, names, blocks)

    async def publish(self, names: Seq[bytes], blocks: Seq[Buffer]) -> int:
        return await self._in_batches(self._publish, names, blocks)

    async def _in_batches(self, move: _Move, names: Seq[bytes], blocks: Seq[Buffer]) -> int:
        loop = asyncio.get_running_loop()
        end, total = loop.time() + self._timeout_s, 0
        for first in range(0, len(names), BATCH):
            batch = _tensors(blocks[first : first + BATCH])
            try:
                done = await move(names[first : first + BATCH], batch)
            except KVPoolUnavailable:
                if not total:
                    raise
                break
            total += done
            if done < len(batch) or loop.time() >= end:
                break
        return total

    async def _load(self, names: Seq[bytes], batch: Seq[Tensor]) -> int:
        host = self._host_memory(len(batch))
        done = await self._pool.load(names, _rows(host))
        await _copied(host[:done], batch[:done])
        return done

    async def _publish(self, names: Seq[bytes], batch: Seq[Tensor]) -> int:
        host = self._host_memory(len(batch))
        await _copied(batch, host)
        return await self._pool.publish(names, _rows(host))

    async def close(self) -> None:
        await self._pool.close()

    def _host_memory(self, count: int) -> Tensor:
        return torch.empty(
            (count, self._block_bytes), dtype=torch.uint8, pin_memory=torch.cuda.is_available()
        )


def _tensors(blocks: Seq[Buffer]) -> list[Tensor]:
    return [block for block in blocks if isinstance(block, Tensor)]


def _rows(host: Tensor) -> list[Buffer]:
    return list(host.numpy())


def _copy(sources: Seq[Tensor] | Tensor, targets: Seq[Tensor] | Tensor) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)


async def _copied(sources: Seq[Tensor] | Tensor, targets: Seq[Tensor] | Tensor) -> None:
    """Copy in a thread. A cancellation waits for that, as until then the caller's blocks are in use."""
    running = asyncio.ensure_future(asyncio.to_thread(_copy, sources, targets))
    try:
        await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise
