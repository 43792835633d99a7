"""The outgoing buffer: order, bounds, and waiting for it to be empty."""

import asyncio

from common.transport.outgoing import Outgoing


async def test_first_in_first_out_and_emptied_when_written() -> None:
    outgoing = Outgoing(10_000)
    await outgoing.emptied()
    for number in range(3):
        assert outgoing.put("s", str(number).encode(), "")
    waiting = asyncio.ensure_future(outgoing.emptied())
    written = []
    for _ in range(3):
        assert not waiting.done()
        written.append((await outgoing.get()).payload)
        outgoing.done()
    await waiting
    assert written == [b"0", b"1", b"2"]


async def test_it_is_bounded_and_room_comes_back() -> None:
    outgoing = Outgoing(1000)
    taken = [outgoing.put("s", bytes(200), "") for _ in range(5)]
    assert taken == [True, True, True, False, False]
    await outgoing.get()
    outgoing.done()
    assert outgoing.put("s", bytes(200), "")


async def test_empty_messages_are_bounded_too() -> None:
    outgoing = Outgoing(1000)
    assert sum(outgoing.put("s", b"", "") for _ in range(1000)) < 1000


async def test_clearing_counts_what_was_not_written() -> None:
    outgoing = Outgoing(1000)
    outgoing.put("s", b"1", "")
    outgoing.put("s", b"2", "")
    await outgoing.get()
    outgoing.done()
    outgoing.clear()
    await outgoing.emptied()
    assert outgoing.num_dropped == 1
    assert outgoing.put("s", bytes(900), "")


async def test_the_writer_wakes_for_a_late_message() -> None:
    outgoing = Outgoing(1000)
    writing = asyncio.ensure_future(outgoing.get())
    await asyncio.sleep(0)
    outgoing.put("s", b"late", "inbox")
    assert await writing == ("s", b"late", "inbox")
