"""The virtual-time loop itself: time jumps, deadlocks and failures are seen."""

import asyncio
import time

import pytest

from tests.support.virtual_loop import Deadlock, Overtime, run_virtual


def test_an_hour_passes_at_once_and_exactly() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        started = loop.time()
        await asyncio.sleep(3000)
        return loop.time() - started

    before = time.monotonic()
    assert run_virtual(main()) == pytest.approx(3000)
    assert time.monotonic() - before < 5


def test_timers_fire_in_order() -> None:
    async def main() -> list[int]:
        done: list[int] = []

        async def note(number: int) -> None:
            await asyncio.sleep(number / 10)
            done.append(number)

        await asyncio.gather(*(note(number) for number in (3, 1, 2)))
        return done

    assert run_virtual(main()) == [1, 2, 3]


def test_waiting_for_nothing_is_a_deadlock() -> None:
    with pytest.raises(Deadlock, match="nothing ready"):
        run_virtual(asyncio.Event().wait())


def test_periodic_tasks_run_into_the_limit() -> None:
    async def main() -> None:
        for _ in range(10_000):
            await asyncio.sleep(0.2)

    with pytest.raises(Overtime):
        run_virtual(main(), limit_s=60)


def test_clean_up_after_the_limit_may_take_time() -> None:
    cleaned = []

    async def main() -> None:
        try:
            await asyncio.sleep(100)
        finally:
            await asyncio.sleep(1)
            cleaned.append(True)

    with pytest.raises(Overtime):
        run_virtual(main(), limit_s=60)
    assert cleaned == [True]


def test_what_a_callback_raises_is_raised() -> None:
    async def main() -> None:
        asyncio.get_running_loop().call_soon(lambda: 1 // 0)
        await asyncio.sleep(1)

    with pytest.raises(ZeroDivisionError):
        run_virtual(main())


def test_threads_work_on_the_spot() -> None:
    async def main() -> int:
        return await asyncio.to_thread(sum, [1, 2, 3])

    assert run_virtual(main()) == 6
