"""Messages that are lost, late, doubled or not the gateway's at all; in virtual time."""

import asyncio

import pytest

from common.errors import GalleyError
from common.ids import RequestId
from common.messages.generation import Accepted, Refused
from common.messages.stream import FinishItem, TokensItem
from services.gateway.owner import RequestOwner
from tests.support.faulty import Faults
from tests.support.scripted_cluster import (
    ScriptedCluster,
    bind,
    generation,
    go_on,
    play,
    read,
    text_of,
)


def test_frames_out_of_order_twice_and_of_old_attempts() -> None:
    async def story(made: ScriptedCluster) -> None:
        p, d = made.workers["p"], made.workers["d"]
        reply = made.gateway.submit(generation(made))
        [job] = await p.jobs.wait_for(1)
        d.emit(job.gateway, FinishItem(job.key, "length", 4))
        d.tokens(job, 2, 3, 4)
        d.tokens(job, 0, 1, 2, 3)
        d.tokens(job, 0, 9, 9, 9, 9, key=job.key._replace(attempt=7))
        deltas = await read(reply)
        assert text_of(deltas) == "abcd"

    play(story)


@pytest.mark.parametrize("kind", ["bound", "tokens", "decoding", "finish", "frame"])
@pytest.mark.parametrize("skip", [0, 1])
def test_a_lost_frame_is_asked_for_again(kind: str, skip: int) -> None:
    faults = Faults()

    async def story(made: ScriptedCluster) -> None:
        p, d = made.workers["p"], made.workers["d"]
        faults.drop(kind, skip=skip)
        reply = made.gateway.submit(generation(made))
        [job] = await p.jobs.wait_for(1)
        bind(p, job, d)
        go_on(d, job, 2, reason=None)
        go_on(d, job, 3, index=2)
        started = made.loop.time()
        assert text_of(await read(reply)) == "abc"
        assert made.loop.time() - started < 1.0

    play(story, faults=faults)


@pytest.mark.parametrize("kind", ["route", "route.ok", "job", "accepted"])
def test_a_lost_question_or_answer_is_repaired_by_asking_once_more(kind: str) -> None:
    faults = Faults()

    async def story(made: ScriptedCluster) -> None:
        p, d = made.workers["p"], made.workers["d"]
        faults.drop(kind)
        reply = made.gateway.submit(generation(made))
        jobs = await p.jobs.wait_for(2 if kind == "accepted" else 1)
        assert {job.key.attempt for job in jobs} == {1}
        bind(p, jobs[0], d)
        go_on(d, jobs[0], 2)
        assert text_of(await read(reply)) == "ab"

    play(story, faults=faults)


def test_items_of_a_request_that_nobody_owns_are_aborted_once() -> None:
    async def story(made: ScriptedCluster) -> None:
        p, d = made.workers["p"], made.workers["d"]
        reply = made.gateway.submit(generation(made))
        [job] = await p.jobs.wait_for(1)
        bind(p, job, d)
        go_on(d, job, 2)
        await read(reply)
        d.tokens(job, 0, 1)  # of a request that has just ended: late, not lost
        strange = job.key._replace(request=RequestId("strange"))
        d.tokens(job, 0, 1, key=strange)
        d.tokens(job, 1, 1, key=strange)
        [abort] = await d.aborts.wait_for(1)
        assert (abort.key, abort.reason) == (strange, "not_owned")
        await asyncio.sleep(1)
        assert len(d.aborts.items) == 1

    play(story)


def test_an_outage_of_the_bus_loses_and_doubles_nothing() -> None:
    async def story(made: ScriptedCluster) -> None:
        p, d = made.workers["p"], made.workers["d"]
        reply = made.gateway.submit(generation(made))
        [job] = await p.jobs.wait_for(1)
        bind(p, job, d)
        go_on(d, job, 2, reason=None)
        await asyncio.sleep(0.1)
        made.hub.stop()
        go_on(d, job, 3, index=2, reason=None)
        await asyncio.sleep(10)
        made.hub.start()
        go_on(d, job, 4, index=3)
        assert text_of(await read(reply)) == "abcd"
        assert len(made.asked.items) == 1

    play(story)


def test_an_item_that_cannot_be_digested_ends_its_own_request_only() -> None:
    async def story(made: ScriptedCluster) -> None:
        p, d = made.workers["p"], made.workers["d"]
        broken, whole = made.gateway.submit(generation(made)), made.gateway.submit(generation(made))
        first, second = await p.jobs.wait_for(2)
        impossible = TokensItem(first.key, 0, (1 << 40,))
        p.emit(first.gateway, impossible, TokensItem(second.key, 0, (1,)))
        go_on(d, second, 2)
        assert text_of(await read(whole)) == "ab"
        with pytest.raises(GalleyError, match="inside the gateway"):
            await read(broken)

    play(story)


def test_an_answer_that_cannot_be_digested_ends_its_own_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def break_down(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(RequestOwner, "on_refused", break_down)

    async def story(made: ScriptedCluster) -> None:
        p, d = made.workers["p"], made.workers["d"]
        p.answer = lambda _: Refused("full", "no")
        with pytest.raises(GalleyError, match="inside the gateway"):
            await read(made.gateway.submit(generation(made)))
        p.answer = lambda _: Accepted()
        whole = made.gateway.submit(generation(made))
        _, job = await p.jobs.wait_for(2)
        bind(p, job, d)
        go_on(d, job, 2)
        assert text_of(await read(whole)) == "ab"

    play(story)
