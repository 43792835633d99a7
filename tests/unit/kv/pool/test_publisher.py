"""Publishing: in order, bounded, once, and nothing is held when it is over."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from common.kv.pool.publisher import BATCH
from tests.support.kv_pair import virtual
from tests.support.leaks import assert_pool_idle
from tests.support.memory_pool import MemoryPool
from tests.support.pool_worker import PoolWorker, stored


@asynccontextmanager
async def publishing(
    store: MemoryPool, num_blocks: int = 128, max_blocks: int = 64
) -> AsyncIterator[PoolWorker]:
    """A worker that publishes; in the end nothing is held."""
    worker = PoolWorker(store, num_blocks, max_blocks=max_blocks)
    running = asyncio.create_task(worker.publisher.run())
    yield worker
    running.cancel()
    await asyncio.wait([running])
    assert_pool_idle(worker.pool)


@virtual
async def test_blocks_stay_until_they_are_published() -> None:
    store = MemoryPool(delay_s=1.0)
    async with publishing(store) as worker:
        blocks = worker.compute(*range(5))
        worker.publisher.offer(blocks)
        worker.pool.release(blocks)
        await asyncio.sleep(0.5)
        assert worker.pool.num_used == 5
        await asyncio.sleep(1)
        assert worker.pool.num_used == 0
        assert store.objects == stored(*range(5))


@virtual
async def test_many_go_in_batches_and_in_order() -> None:
    store = MemoryPool(delay_s=1.0)
    async with publishing(store) as worker:
        blocks = worker.compute(*range(BATCH + 5))
        worker.publisher.offer(blocks)
        worker.pool.release(blocks)
        await asyncio.sleep(1.5)
        assert store.objects == stored(*range(BATCH))
        assert worker.pool.num_used == 5
        await asyncio.sleep(1)
        assert list(store.objects) == list(stored(*range(BATCH + 5)))


@virtual
async def test_when_the_queue_is_full_the_newest_are_dropped_and_counted() -> None:
    store = MemoryPool(delay_s=1.0)
    async with publishing(store, max_blocks=8) as worker:
        blocks = worker.compute(*range(20))
        worker.publisher.offer(blocks[:6])
        worker.publisher.offer(blocks[6:])
        worker.pool.release(blocks)
        assert worker.dropped == 12
        await asyncio.sleep(5)
        assert store.objects == stored(*range(8))


@virtual
async def test_what_the_cache_had_is_published_only_if_it_was_not_before() -> None:
    store = MemoryPool()
    async with publishing(store) as worker:
        blocks = worker.compute(*range(6))
        worker.publisher.offer(blocks[:3])
        await asyncio.sleep(1)
        worker.publisher.offer(blocks, num_cached=5)  # 3 and 4 came otherwise
        await asyncio.sleep(1)
        assert store.objects == stored(*range(6))
        assert store.calls["publish"] == 2
        worker.publisher.offer(blocks, num_cached=6)
        await asyncio.sleep(1)
        assert store.calls["publish"] == 2
        # Computed anew although published once: then it is in no cache any more, and maybe in no pool.
        store.objects.clear()
        worker.publisher.offer(blocks[:1])
        worker.pool.release(blocks)
        await asyncio.sleep(1)
        assert store.objects == stored(0)


@virtual
async def test_unnamed_blocks_are_copies() -> None:
    store = MemoryPool()
    async with publishing(store) as worker:
        first, second = worker.compute(1), worker.compute(1)
        worker.publisher.offer(second)
        worker.pool.release([*first, *second])
        await asyncio.sleep(1)
        assert not store.calls


@virtual
async def test_a_pool_that_fails_gets_nothing_for_a_while_and_holds_nothing() -> None:
    store = MemoryPool()
    store.down = True
    async with publishing(store) as worker:
        blocks = worker.compute(*range(40))
        worker.publisher.offer(blocks)
        await asyncio.sleep(0.5)
        assert (store.calls["publish"], worker.dropped) == (1, 40)
        worker.publisher.offer(blocks)
        assert worker.dropped == 80
        assert all(worker.pool._references[block] == 1 for block in blocks)
        store.down = False
        await asyncio.sleep(1)
        worker.publisher.offer(blocks)
        worker.pool.release(blocks)
        await asyncio.sleep(1)
        assert store.objects == stored(*range(40))


@virtual
async def test_what_a_full_pool_refuses_is_counted() -> None:
    store = MemoryPool(max_blocks=3)
    async with publishing(store) as worker:
        blocks = worker.compute(*range(5))
        worker.publisher.offer(blocks)
        worker.pool.release(blocks)
        await asyncio.sleep(1)
        assert store.objects == stored(0, 1, 2)
        assert worker.dropped == 2


@virtual
async def test_ended_amid_a_call_it_gives_every_block_back() -> None:
    async with publishing(MemoryPool(delay_s=1.0)) as worker:
        blocks = worker.compute(*range(50))
        worker.publisher.offer(blocks)
        worker.pool.release(blocks)
        await asyncio.sleep(0.5)
        assert worker.pool.num_used == 50
