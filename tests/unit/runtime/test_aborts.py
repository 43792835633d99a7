"""An abort is repeated until its target answers sensibly, is gone, or the request's time is over."""

import asyncio
from collections.abc import Callable

import pytest

from common.clock import LoopClock
from common.ids import AttemptKey, Incarnation, InstanceId, InstanceRef, RequestId
from common.messages.generation import Abort, Accepted, Refused
from common.messages.subjects import Subjects
from common.routing.cluster_view import ClusterView
from common.runtime.aborts import abort_until_answered
from common.runtime.bus import MessageBus, Reply
from common.transport.memory import MemoryHub
from tests.support.virtual_loop import run_virtual

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
