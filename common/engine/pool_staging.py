"""A KV pool for blocks in a GPU's memory: they go by way of host memory, which is all that stores know.

Knows nothing of stores and of who wants a block.
"""

import asyncio
from collections.abc import Sequence as Seq
from typing import Final

import torch
from torch import Tensor

from common.ids import BlockId
from common.kv.buffer import Buffer, KVBuffer
from common.kv.pool.base import KVPool

BATCH: Final = 32
"""Blocks that are in host memory at once, for each call."""


def staged(pool: KVPool, buffer: KVBuffer) -> KVPool:
    """`pool` as it can be used with the blocks of `buffer`, wherever they lie."""
    block = buffer.block(BlockId(0))
    return StagedPool(pool, buffer.block_bytes) if isinstance(block, Tensor) else pool


class StagedPool:
    """A KVPool whose blocks are uint8 tensors on any device."""

    def __init__(self, pool: KVPool, block_bytes: int) -> None:
        self._pool = pool
        self._block_bytes = block_bytes

    async def match(self, names: Seq[bytes]) -> int:
        return await self._pool.match(names)

    async def load(self, names: Seq[bytes], blocks: Seq[Buffer]) -> int:
        total = 0
        for first in range(0, len(names), BATCH):
            batch = _tensors(blocks[first : first + BATCH])
            host = self._host_memory(len(batch))
            done = await self._pool.load(names[first : first + BATCH], _rows(host))
            await _copied(host[:done], batch[:done])
            total += done
            if done < len(batch):
                break
        return total

    async def publish(self, names: Seq[bytes], blocks: Seq[Buffer]) -> int:
        total = 0
        for first in range(0, len(names), BATCH):
            batch = _tensors(blocks[first : first + BATCH])
            host = self._host_memory(len(batch))
            await _copied(batch, host)
            done = await self._pool.publish(names[first : first + BATCH], _rows(host))
            total += done
            if done < len(batch):
                break
        return total

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
