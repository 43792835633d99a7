"""Blocks that a store cannot reach go by way of host memory; tensors of the CPU stand for those of a GPU."""

import asyncio
import threading
from collections.abc import Sequence as Seq

import pytest
import torch
from torch import Tensor

from common.engine import pool_staging
from common.engine.pool_staging import BATCH, StagedPool, staged
from common.engine.runner_fake import FakeBuffer
from common.errors import KVPoolUnavailable
from common.transport.kv import Buffer
from tests.support.memory_pool import MemoryPool
from tests.support.pool_worker import BLOCK_BYTES, content, name, stored
from tests.support.virtual_loop import run_virtual

TIMEOUT_S = 2.0
COUNT = BATCH + 5
NAMES = [name(number) for number in range(COUNT)]


def block(fill: int = 255) -> Tensor:
    return torch.full((BLOCK_BYTES,), fill, dtype=torch.uint8)


def holding(number: int) -> Tensor:
    return torch.frombuffer(bytearray(content(number)), dtype=torch.uint8)


async def test_what_is_published_is_loaded() -> None:
    store = MemoryPool(delay_s=0)
    pool = StagedPool(store, BLOCK_BYTES, TIMEOUT_S)
    assert await pool.publish(NAMES, [holding(number) for number in range(COUNT)]) == COUNT
    assert store.objects == stored(*range(COUNT))
    assert await pool.match([*NAMES, name(999)]) == COUNT
    blocks = [block() for _ in NAMES]
    assert await pool.load(NAMES, blocks) == COUNT
    assert all(torch.equal(found, holding(number)) for number, found in enumerate(blocks))


@pytest.mark.parametrize("damaged", [3, BATCH - 1, BATCH, BATCH + 2])
async def test_a_damaged_one_ends_it_and_nothing_of_it_arrives(damaged: int) -> None:
    store = MemoryPool(delay_s=0)
    store.objects = stored(*range(COUNT))
    store.damaged = {name(damaged)}
    blocks = [block() for _ in NAMES]
    assert await StagedPool(store, BLOCK_BYTES, TIMEOUT_S).load(NAMES, blocks) == damaged
    assert torch.equal(blocks[damaged - 1], holding(damaged - 1))
    assert torch.equal(blocks[damaged], block())


async def test_a_full_store_ends_publishing() -> None:
    store = MemoryPool(delay_s=0, max_blocks=BATCH + 1)
    blocks = [holding(number) for number in range(COUNT)]
    assert await StagedPool(store, BLOCK_BYTES, TIMEOUT_S).publish(NAMES, blocks) == BATCH + 1


class Leaving(MemoryPool):
    """Gone after its first load."""

    async def load(self, names: Seq[bytes], blocks: Seq[Buffer]) -> int:
        done = await super().load(names, blocks)
        self.down = True
        return done


async def test_what_was_loaded_before_the_store_failed_is_the_answer() -> None:
    store = Leaving(delay_s=0)
    store.objects = stored(*range(COUNT))
    pool, blocks = StagedPool(store, BLOCK_BYTES, TIMEOUT_S), [block() for _ in NAMES]
    assert await pool.load(NAMES, blocks) == BATCH
    assert torch.equal(blocks[BATCH - 1], holding(BATCH - 1))
    with pytest.raises(KVPoolUnavailable):
        await pool.load(NAMES, blocks)


@pytest.mark.parametrize("call", ["load", "publish"])
def test_a_slow_store_is_not_waited_for_batch_after_batch(call: str) -> None:
    count = 4 * BATCH
    store = MemoryPool(delay_s=0.75 * TIMEOUT_S, timeout_s=TIMEOUT_S)
    blocks = [holding(number) for number in range(count)]
    names = [name(number) for number in range(count)]

    async def main() -> tuple[int, float]:
        loop = asyncio.get_running_loop()
        begun = loop.time()
        if call == "load":
            store.objects = stored(*range(count))
        done = await getattr(StagedPool(store, BLOCK_BYTES, TIMEOUT_S), call)(names, blocks)
        return done, loop.time() - begun

    done, seconds = run_virtual(main())
    assert done == 2 * BATCH
    assert seconds == pytest.approx(1.5 * TIMEOUT_S)


async def test_a_cancelled_call_ends_when_it_touches_nothing_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = MemoryPool(delay_s=0)
    store.objects = stored(*range(COUNT))
    loop, copying, go_on = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
    copy = pool_staging._copy

    def gated_copy(sources: Tensor, targets: list[Tensor]) -> None:
        loop.call_soon_threadsafe(copying.set)
        go_on.wait(10)
        copy(sources, targets)

    monkeypatch.setattr(pool_staging, "_copy", gated_copy)
    blocks = [block() for _ in NAMES]
    loading = asyncio.create_task(StagedPool(store, BLOCK_BYTES, TIMEOUT_S).load(NAMES, blocks))
    await copying.wait()
    loading.cancel()
    for _ in range(5):
        await asyncio.sleep(0)
    assert not loading.done()
    go_on.set()
    await asyncio.wait([loading])
    assert loading.cancelled()
    assert torch.equal(blocks[0], holding(0))
    assert torch.equal(blocks[BATCH], block())


def test_blocks_in_host_memory_need_no_detour() -> None:
    store = MemoryPool()
    assert staged(store, FakeBuffer(1, BLOCK_BYTES), TIMEOUT_S) is store
