"""Prefixes from a pool: what is loaded, what is not, and that nothing is held afterwards."""

import asyncio

import pytest

from tests.support.kv_pair import virtual
from tests.support.leaks import assert_pool_idle
from tests.support.memory_pool import MemoryPool
from tests.support.pool_worker import PoolWorker, name, stored

NAMES = [name(number) for number in range(10)]


@virtual
async def test_what_is_here_is_kept_and_the_pool_s_part_of_the_rest_is_loaded() -> None:
    store = MemoryPool()
    store.objects = stored(*range(8), 9)
    worker = PoolWorker(store)
    worker.pool.release(worker.compute(0, 1, 2))
    await worker.loader.load(NAMES)
    assert worker.holds(*range(8))
    assert not worker.holds(9)  # without the one before it, it is of no use
    assert store.loaded == 5
    assert_pool_idle(worker.pool)


@virtual
async def test_all_here_asks_nobody() -> None:
    store = MemoryPool()
    worker = PoolWorker(store)
    worker.pool.release(worker.compute(*range(10)))
    await worker.loader.load(NAMES)
    assert not store.calls


@virtual
async def test_too_few_are_not_worth_it() -> None:
    store = MemoryPool()
    store.objects = stored(*range(10))
    worker = PoolWorker(store)
    worker.loader._min_blocks = 4
    worker.pool.release(worker.compute(*range(7)))
    assert not worker.loader.missing(NAMES)
    assert len(worker.loader.missing([*NAMES, name(10)])) == 4


@pytest.mark.parametrize(("headroom", "loaded"), [(20, 6), (26, 0), (30, 0)])
@virtual
async def test_only_room_beside_the_headroom_is_used(headroom: int, loaded: int) -> None:
    store = MemoryPool()
    store.objects = stored(*range(10))
    worker = PoolWorker(store, headroom=headroom)
    used = worker.pool.allocate(6)
    await worker.loader.load(NAMES)
    assert store.loaded == loaded
    assert worker.pool.num_used == len(used)


@virtual
async def test_a_damaged_block_ends_what_can_be_had() -> None:
    store = MemoryPool()
    store.objects = stored(*range(10))
    store.damaged = {name(4)}
    worker = PoolWorker(store)
    await worker.loader.load(NAMES)
    assert worker.holds(0, 1, 2, 3)
    assert not any(worker.holds(number) for number in range(4, 10))
    assert_pool_idle(worker.pool)


@virtual
async def test_one_prefix_is_loaded_once_and_what_follows_it_by_each() -> None:
    store = MemoryPool(delay_s=0.1)
    store.objects = stored(*range(10), *range(100, 105), *range(200, 205))
    worker = PoolWorker(store)
    tails = [[name(number) for number in range(start, start + 5)] for start in (100, 200)]
    await asyncio.gather(*(worker.loader.load([*NAMES, *tail]) for tail in tails))
    assert worker.holds(*range(10), *range(100, 105), *range(200, 205))
    assert store.loaded == 20


@virtual
async def test_who_waited_goes_on_when_the_other_is_cancelled() -> None:
    store = MemoryPool(delay_s=0.1)
    store.objects = stored(*range(10))
    worker = PoolWorker(store)
    first, second = (asyncio.ensure_future(worker.loader.load(NAMES)) for _ in range(2))
    await asyncio.sleep(0.15)
    first.cancel()
    await second
    assert worker.holds(*range(10))
    assert_pool_idle(worker.pool)


@virtual
async def test_a_pool_that_fails_is_asked_once_and_then_left_alone() -> None:
    store = MemoryPool()
    store.objects = stored(*range(10))
    store.down = True
    worker = PoolWorker(store)
    for _ in range(5):
        await worker.loader.load(NAMES)
    assert store.calls == {"match": 1}
    assert not worker.loader.missing(NAMES)
    store.down = False
    await asyncio.sleep(1)
    await worker.loader.load(NAMES)
    assert worker.holds(*range(10))


@virtual
async def test_whatever_a_store_raises_costs_only_the_cache() -> None:
    store = MemoryPool()
    store.objects = stored(*range(10))
    store.objects[name(3)] = b"of another length"
    worker = PoolWorker(store)
    await worker.loader.load(NAMES)
    assert not worker.link.usable
    assert_pool_idle(worker.pool)


@virtual
async def test_cancelled_amid_a_load_it_gives_every_block_back() -> None:
    store = MemoryPool(delay_s=1.0)
    store.objects = stored(*range(10))
    worker = PoolWorker(store)
    loading = asyncio.ensure_future(worker.loader.load(NAMES))
    await asyncio.sleep(1.5)
    assert worker.pool.num_used == 10
    loading.cancel()
    await asyncio.wait([loading])
    assert_pool_idle(worker.pool)
    await worker.loader.load(NAMES)
    assert worker.holds(*range(10))
