"""A reply hands batches to a push that takes them, and to its reader otherwise, in order and each once."""

import asyncio

from common.messages.stream import TokenLogprobs
from services.gateway.reply import Batch, Reply
from services.gateway.request import Delta, Timing, Token, Usage


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


async def test_more_bytes_than_the_limit_are_an_overflow() -> None:
    reply, told = make_reply(limit=2 * delta("a").num_bytes)
    for text in "ab":
        reply.put(delta(text))
        reply.deliver()
    assert told == []
    reply.put(delta("c"))
    reply.deliver()
    assert told == ["overflow"]


async def test_what_was_read_or_pushed_does_not_count() -> None:
    reply, told = make_reply(limit=2 * delta("a").num_bytes)
    taking = True
    reply.push = lambda _: taking
    for text in "abc":
        reply.put(delta(text))
        reply.deliver()
    taking = False
    for text in "abc":
        reply.put(delta(text))
        reply.deliver()
        await anext(reply)
    assert told == []


async def test_a_reader_that_only_waits_for_its_turn_is_not_slow() -> None:
    reply, told = make_reply(limit=1)
    reader = asyncio.ensure_future(anext(reply))
    await asyncio.sleep(0)
    for text in "ab":
        reply.put(delta(text))
        reply.deliver()
    assert [one.text for one in await reader] == ["a", "b"]
    assert told == []
    reply.put(delta("c"))
    reply.deliver()
    assert told == ["overflow"]


def test_log_probabilities_have_their_weight() -> None:
    plain = Delta(0, "a", (Token(1),))
    one = TokenLogprobs(-0.5, tuple((token, -1.0) for token in range(20)))
    rich = Delta(0, "a", (Token(1, one),))
    prompt = Delta(0, "", (), prompt=(one,) * 1000)
    assert 200 < plain.num_bytes < 400
    assert 2_000 < rich.num_bytes < 4_000
    assert prompt.num_bytes > 2_000_000
