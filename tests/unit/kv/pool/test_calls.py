"""Calls in threads: bounded, each with a deadline, and none touches memory that was taken back."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from common.errors import KVPoolUnavailable
from common.kv.pool.base import PoolEvent
from common.kv.pool.calls import Call, PoolCalls
from tests.support.pool_meter import CountingMeter

WAIT_S = 10


class EndMeter(CountingMeter):
    """`ended` is set when a thread that counted something has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.ended = asyncio.Event()

    def count(self, event: PoolEvent, blocks: int) -> None:
        super().count(event, blocks)
        self.ended.set()


class Hanging:
    """Work that gets some blocks done and then hangs until `release`."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.release = threading.Event()
        self.after: Callable[[Call], None] = lambda call: None

    def __call__(self, call: Call) -> None:
        call.done = self.blocks
        call.events["evicted"] = 1
        assert self.release.wait(WAIT_S)
        self.after(call)


def three(call: Call) -> None:
    call.done = 3


@asynccontextmanager
async def hanging(meter: CountingMeter, blocks: int = 0) -> AsyncIterator[tuple[PoolCalls, Hanging]]:
    """One call at a time, of which one will hang; released at the end."""
    work = Hanging(blocks)
    calls = PoolCalls(0.02, 1, meter)
    try:
        yield calls, work
    finally:
        work.release.set()
        await calls.close()


async def test_a_call_gives_what_it_did() -> None:
    assert await PoolCalls(WAIT_S, 1, CountingMeter()).run(three) == 3


async def test_a_call_that_hangs_costs_one_deadline_and_those_after_it_none() -> None:
    meter = EndMeter()
    async with hanging(meter) as (calls, work):
        with pytest.raises(KVPoolUnavailable, match=r"within 0\.02 s"):
            await calls.run(work)
        for _ in range(3):
            with pytest.raises(KVPoolUnavailable, match="earlier call"):
                await calls.run(three)
        assert meter.events["unavailable"] == 4
        work.release.set()
        await asyncio.wait_for(meter.ended.wait(), WAIT_S)
        assert await calls.run(three) == 3
        assert meter.events["evicted"] == 1  # counted though nobody waited for it


async def test_what_was_done_by_the_deadline_is_the_answer() -> None:
    async with hanging(CountingMeter(), blocks=2) as (calls, work):
        assert await calls.run(work) == 2


async def test_memory_is_not_touched_once_its_call_was_given_up() -> None:
    meter = EndMeter()
    target = bytearray(4)
    refused = threading.Event()

    def copy(call: Call) -> None:
        try:
            call.copy(memoryview(target), memoryview(b"late"))
        except BaseException:
            refused.set()
            raise

    async with hanging(meter) as (calls, work):
        work.after = copy
        with pytest.raises(KVPoolUnavailable):
            await calls.run(work)
        work.release.set()
        await asyncio.wait_for(meter.ended.wait(), WAIT_S)
        assert refused.is_set()
        assert target == bytearray(4)


async def test_waiting_for_a_thread_is_part_of_the_deadline() -> None:
    async with hanging(CountingMeter()) as (calls, work):
        first = asyncio.create_task(calls.run(work))
        second = asyncio.create_task(calls.run(three))
        results = await asyncio.gather(first, second, return_exceptions=True)
        assert [type(result) for result in results] == [KVPoolUnavailable, KVPoolUnavailable]


async def test_a_cancelled_call_is_not_held_against_the_store() -> None:
    async with hanging(CountingMeter()) as (calls, work):
        task = asyncio.create_task(calls.run(work))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        work.release.set()
        assert await calls.run(three) == 3


async def test_a_store_that_hangs_is_found_out_though_its_caller_left() -> None:
    async with hanging(CountingMeter()) as (calls, work):
        task = asyncio.create_task(calls.run(work))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        with pytest.raises(KVPoolUnavailable, match=r"within 0\.02 s"):
            await calls.run(three)
        with pytest.raises(KVPoolUnavailable, match="earlier call"):
            await calls.run(three)


async def test_errors_of_the_system_mean_unavailable_and_mistakes_stay_mistakes() -> None:
    def full(call: Call) -> None:
        raise OSError(28, "No space left on device")

    def wrong(call: Call) -> None:
        raise ValueError("a mistake")

    calls = PoolCalls(WAIT_S, 1, CountingMeter())
    with pytest.raises(KVPoolUnavailable, match="No space left"):
        await calls.run(full)
    with pytest.raises(ValueError, match="a mistake"):
        await calls.run(wrong)
    assert await calls.run(three) == 3


async def test_no_thread_to_be_had_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    calls = PoolCalls(WAIT_S, 1, CountingMeter())
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(KVPoolUnavailable, match="new thread"):
            await calls.run(three)
    assert await calls.run(three) == 3
