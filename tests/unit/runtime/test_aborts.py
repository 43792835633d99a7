"""An abort is repeated until its target answers sensibly, is gone, or the request's time is over."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from common.clock import LoopClock
from common.ids import AttemptKey, Incarnation, InstanceId, InstanceRef, RequestId
from common.messages.generation import Abort, Accepted, Refused
from common.messages.subjects import Subjects
from common.routing.cluster_view import ClusterView
from common.runtime.aborts import abort_until_answered
from common.runtime.bus import MessageBus, Reply
from common.transport.memory import MemoryHub
from tests.support.fleet import worker_beat
from tests.support.virtual_loop import run_virtual
from tests.support.waiting import Collector

TARGET = InstanceRef(InstanceId("d1"), Incarnation("i1"))
ABORT = Abort(AttemptKey(RequestId("r"), 1, 0), 3.0, "client")


async def aborting(answer: Callable[[int, Reply], None] | None) -> tuple[float, int]:
    """Seconds until the abort is given up, and how often the target has heard it.

    `answer` gets the number of the question, from 1, and what to answer it with; without it nobody listens.
    """
    hub, loop = MemoryHub(), asyncio.get_running_loop()
    ours, theirs = (MessageBus(hub.client(), Subjects("test")) for _ in range(2))
    await ours.connect()
    await theirs.connect()
    heard = 0

    def hear(_abort: Abort, reply: Reply) -> None:
        nonlocal heard
        heard += 1
        if answer is not None:
            answer(heard, reply)

    if answer is not None:
        await theirs.subscribe(theirs.subjects.abort(TARGET.instance), hear, Abort)
    started, clock = loop.time(), LoopClock(loop)
    await abort_until_answered(ours, ClusterView(clock), clock, TARGET, ABORT)
    return round(loop.time() - started, 3), heard


def accept(_number: int, reply: Reply) -> None:
    reply(Accepted())


def accept_the_third(number: int, reply: Reply) -> None:
    if number == 3:
        reply(Accepted())


def talk_nonsense_once(number: int, reply: Reply) -> None:
    reply(Accepted() if number > 1 else Refused("full", "an abort cannot be refused"))


def say_nothing(_number: int, _reply: Reply) -> None:
    pass


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (accept, (0.0, 1)),
        (accept_the_third, (1.0, 3)),
        (talk_nonsense_once, (0.5, 2)),
        (say_nothing, (3.0, 6)),
        (None, (0.0, 0)),
    ],
)
def test_how_long_an_abort_is_repeated(
    answer: Callable[[int, Reply], None] | None, outcome: tuple[float, int]
) -> None:
    assert run_virtual(aborting(answer)) == outcome


def test_one_that_comes_back_from_the_dead_is_told() -> None:
    async def main() -> None:
        hub, loop = MemoryHub(), asyncio.get_running_loop()
        ours, theirs = (MessageBus(hub.client(), Subjects("test")) for _ in range(2))
        await ours.connect()
        await theirs.connect()
        clock = LoopClock(loop)
        view = ClusterView(clock)
        view.observe(worker_beat("d1"))
        view.note_gone(TARGET)
        abort = replace(ABORT, time_left_s=60.0)
        aborting = asyncio.ensure_future(abort_until_answered(ours, view, clock, TARGET, abort))
        await asyncio.sleep(5)
        heard: Collector[Abort] = Collector()

        def hear(told: Abort, reply: Reply) -> None:
            heard.add(told)
            reply(Accepted())

        await theirs.subscribe(theirs.subjects.abort(TARGET.instance), hear, Abort)
        await asyncio.sleep(5)
        assert heard.items == []
        view.observe(worker_beat("d1"))
        await aborting
        assert heard.items == [abort]

    run_virtual(main())


def test_nobody_tells_an_incarnation_that_was_replaced() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        started = loop.time()
        bus = MessageBus(MemoryHub().client(), Subjects("test"))
        await bus.connect()
        view = ClusterView(LoopClock(loop))
        view.observe(worker_beat("d1"))
        view.observe(worker_beat("d1", incarnation="i2"))
        await abort_until_answered(bus, view, LoopClock(loop), TARGET, ABORT)
        return loop.time() - started

    assert run_virtual(main()) == 0.0
