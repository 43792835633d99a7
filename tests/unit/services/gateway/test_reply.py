"""A reply hands batches to a push that takes them, and to its reader otherwise, in order and each once."""

import asyncio

from services.gateway.reply import Batch, Reply
from services.gateway.request import Delta, Timing, Usage


def make_reply(limit: int = 100) -> tuple[Reply, list[str]]:
    told: list[str] = []
    reply = Reply(
        limit,
        usage=lambda: Usage(0, 0, 0),
        timing=Timing,
        on_overflow=lambda: told.append("overflow"),
        on_close=lambda: told.append("close"),
    )
    return reply, told


def delta(text: str) -> Delta:
    return Delta(0, text, ())


async def test_a_push_takes_batches_while_it_can_and_the_reader_has_the_rest() -> None:
    reply, _ = make_reply()
    pushed: list[str] = []
    free = True

    def push(batch: Batch) -> bool:
        if free:
            pushed.extend(one.text for one in batch)
        return free

    reply.push = push
    reply.put(delta("a"))
    reply.put(delta("b"))
    assert pushed == []  # one batch for a step
    reply.deliver()
    assert pushed == ["a", "b"]
    free = False
    reply.put(delta("c"))
    reply.deliver()
    reply.put(delta("d"))
    reply.deliver()
    assert [one.text for one in await anext(reply)] == ["c", "d"]
    free = True
    reply.put(delta("e"))
    reply.end()
    reply.deliver()
    assert pushed == ["a", "b"]  # the end is the reader's
    assert [[one.text for one in batch] async for batch in reply] == [["e"]]


async def test_a_reader_that_waits_is_woken_by_a_delivery() -> None:
    reply, _ = make_reply()
    reader = asyncio.ensure_future(anext(reply))
    await asyncio.sleep(0)
    reply.put(delta("a"))
    reply.deliver()
    reply.deliver()
    assert [one.text for one in await reader] == ["a"]


async def test_more_than_the_limit_is_an_overflow() -> None:
    reply, told = make_reply(limit=2)
    for text in "abc":
        reply.put(delta(text))
    assert told == ["overflow"]
