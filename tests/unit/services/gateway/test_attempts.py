"""Workers that refuse, fail, fall silent or die: the choice goes on elsewhere, or ends clearly."""

import asyncio

import pytest

from common.config import GatewaySettings
from common.errors import (
    AttemptsExhausted,
    ContextLengthExceeded,
    GalleyError,
    NoInstance,
    Overloaded,
    WorkerFailed,
)
from common.messages.generation import Accepted, Job, Refused, Rejected, Route
from common.messages.stream import (
    BoundItem,
    FailedItem,
)
from tests.support.scripted_cluster import (
    EOS,
    ScriptedCluster,
    bind,
    generation,
    go_on,
    play,
    read,
    reasons,
    text_of,
)


def test_an_unanswered_job_is_aborted_and_goes_elsewhere() -> None:
    async def story(made: ScriptedCluster) -> None:
        p, d = made.workers["p"], made.workers["d"]
        p2 = made.worker("p2", "prefill")
        p.answer = lambda _: None
        made.routes = [Route(p.ref, d.ref), Route(p2.ref, d.ref)]
        reply = made.gateway.submit(generation(made))
        [job] = await p2.jobs.wait_for(1)
        assert job.key.attempt == 2
        assert made.asked.items[1].exclude == (p.ref,)
        assert len(p.jobs.items) == 2
        [abort] = await p.aborts.wait_for(1)
        assert (abort.key.attempt, abort.reason) == (1, "superseded")
        bind(p2, job, d)
        go_on(d, job, 2)
        assert text_of(await read(reply)) == "ab"

    play(story)


@pytest.mark.parametrize("reason", ["full", "draining", "stale", "mismatch", "aborted"])
def test_a_refused_job_goes_elsewhere_at_once(reason: str) -> None:
    async def story(made: ScriptedCluster) -> None:
        p, d = made.workers["p"], made.workers["d"]
        p2 = made.worker("p2", "prefill")
        p.answer = lambda _: Refused(reason, "no")  # type: ignore[arg-type]
        made.routes = [Route(p.ref, d.ref), Route(p2.ref, d.ref)]
        started = made.loop.time()
        reply = made.gateway.submit(generation(made))
        [job] = await p2.jobs.wait_for(1)
        assert made.loop.time() == started
        bind(p2, job, d)
        go_on(d, job, 2)
        assert text_of(await read(reply)) == "ab"
        assert not p.aborts.items

    play(story)


def test_nobody_listens_on_the_job_subject() -> None:
    async def story(made: ScriptedCluster) -> None:
        p, d = made.workers["p"], made.workers["d"]
        p.kill()
        made.routes = [Route(p.ref, d.ref), Rejected("no_prefill", "no prefill instance", 1.5)]
        started = made.loop.time()
        with pytest.raises(NoInstance) as caught:
            await read(made.gateway.submit(generation(made)))
        assert caught.value.retry_after_s == 1.5
        assert made.loop.time() == started

    play(story)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (Rejected("no_prefill", "none", 1.0), NoInstance),
        (Rejected("no_decode", "none", 1.0), NoInstance),
        (Rejected("overloaded", "busy", 4.0), Overloaded),
        (Rejected("too_long", "too long", 0.0), ContextLengthExceeded),
    ],
)
def test_rejections(answer: Rejected, error: type[GalleyError]) -> None:
    async def story(made: ScriptedCluster) -> None:
        made.routes = [answer]
        with pytest.raises(error):
            await read(made.gateway.submit(generation(made)))
        assert (
            made.metrics.registry.get_sample_value(
                "galley_requests_total", {"instance": "gw", "role": "gateway", "status": "error"}
            )
            == 1.0
        )

    play(story)


def test_full_everywhere_is_429() -> None:
    async def story(made: ScriptedCluster) -> None:
        p, d = made.workers["p"], made.workers["d"]
        p.answer = lambda _: Refused("full", "no room")
        made.routes = [Route(p.ref, d.ref), Rejected("no_prefill", "nobody else", 2.0)]
        with pytest.raises(Overloaded):
            await read(made.gateway.submit(generation(made)))

    play(story)


def test_what_can_never_fit_is_the_clients_error() -> None:
    async def story(made: ScriptedCluster) -> None:
        made.workers["p"].answer = lambda _: Refused("invalid", "longer than the pool")
        with pytest.raises(ContextLengthExceeded, match="longer than the pool"):
            await read(made.gateway.submit(generation(made)))

    play(story)


def test_a_retryable_failure_goes_on_with_the_output_so_far() -> None:
    async def story(made: ScriptedCluster) -> None:
        p, d = made.workers["p"], made.workers["d"]
        d2 = made.worker("d2", "decode")
        made.routes = [Route(p.ref, d.ref), Route(p.ref, d2.ref)]
        reply = made.gateway.submit(generation(made))
        [job] = await p.jobs.wait_for(1)
        bind(p, job, d)
        go_on(d, job, 2, reason=None)
        d.emit(job.gateway, FailedItem(job.key, "step_failed", "broken", True))
        job = (await p.jobs.wait_for(2))[1]
        assert (job.key.attempt, job.output_ids) == (2, (1, 2))
        assert made.asked.items[1].exclude == (d.ref,)
        p.emit(job.gateway, BoundItem(job.key, d2.ref))
        p.tokens(job, 2, 3)
        go_on(d2, job, 4, index=3)
        deltas = await read(reply)
        assert (text_of(deltas), reasons(deltas)) == ("abcd", ["length"])
        assert not d.aborts.items

    play(story)


def test_the_only_worker_is_asked_again_after_it_failed() -> None:
    async def story(made: ScriptedCluster) -> None:
        p, d = made.workers["p"], made.workers["d"]
        route = Route(p.ref, d.ref)
        made.routes = [route, Rejected("no_prefill", "nobody else", 1.0), route]
        reply = made.gateway.submit(generation(made))
        [job] = await p.jobs.wait_for(1)
        p.emit(job.gateway, FailedItem(job.key, "step_failed", "broken", True))
        job = (await p.jobs.wait_for(2))[1]
        assert [request.exclude for request in made.asked.items] == [(), (p.ref,), ()]
        bind(p, job, d)
        go_on(d, job, 2)
        assert text_of(await read(reply)) == "ab"

    play(story)


def test_a_failure_for_good_ends_the_request_and_the_other_choices() -> None:
    async def story(made: ScriptedCluster) -> None:
        p, d = made.workers["p"], made.workers["d"]
        reply = made.gateway.submit(generation(made, n=2))
        first, second = await p.jobs.wait_for(2)
        bind(p, second, d)
        p.emit(first.gateway, FailedItem(first.key, "worker_failed", "impossible", False))
        with pytest.raises(WorkerFailed, match="impossible"):
            await read(reply)
        aborts = [*await p.aborts.wait_for(2), *await d.aborts.wait_for(1)]
        assert {abort.key for abort in aborts} == {first.key, second.key}

    play(story)


def test_attempts_are_bounded() -> None:
    async def story(made: ScriptedCluster) -> None:
        p = made.workers["p"]

        def fail(job: Job) -> Accepted:
            made.loop.call_later(
                0.01, p.emit, job.gateway, FailedItem(job.key, "step_failed", "broken", True)
            )
            return Accepted()

        p.answer = fail
        with pytest.raises(AttemptsExhausted, match="3 attempts: broken"):
            await read(made.gateway.submit(generation(made)))
        assert [job.key.attempt for job in p.jobs.items] == [1, 2, 3]

    play(story, settings=GatewaySettings(max_attempts=3))


@pytest.mark.parametrize("crash", [True, False])
def test_death_of_the_prefill_before_decode_has_it(crash: bool) -> None:
    async def story(made: ScriptedCluster) -> None:
        p, d = made.workers["p"], made.workers["d"]
        p2 = made.worker("p2", "prefill")
        made.routes = [Route(p.ref, d.ref), Route(p2.ref, d.ref)]
        reply = made.gateway.submit(generation(made))
        [job] = await p.jobs.wait_for(1)
        bind(p, job, d)
        await asyncio.sleep(0.1)
        died = made.loop.time()
        p.kill() if crash else p.hang()
        [job] = await p2.jobs.wait_for(1)
        assert made.loop.time() - died < (1.1 if crash else 3.5)
        assert job.output_ids == (1,)
        [abort] = await d.aborts.wait_for(1)
        assert abort.reason == "superseded"
        go_on(d, job, 2)
        assert text_of(await read(reply)) == "ab"

    play(story)


def test_death_of_the_prefill_after_decode_has_it_changes_nothing() -> None:
    async def story(made: ScriptedCluster) -> None:
        p, d = made.workers["p"], made.workers["d"]
        reply = made.gateway.submit(generation(made))
        [job] = await p.jobs.wait_for(1)
        bind(p, job, d)
        go_on(d, job, 2, reason=None)
        p.kill()
        await asyncio.sleep(5)
        go_on(d, job, 3, index=2)
        assert text_of(await read(reply)) == "abc"
        assert len(made.asked.items) == 1

    play(story)


def test_death_of_the_decode_while_decoding() -> None:
    async def story(made: ScriptedCluster) -> None:
        p, d = made.workers["p"], made.workers["d"]
        d2 = made.worker("d2", "decode")
        reply = made.gateway.submit(generation(made))
        [job] = await p.jobs.wait_for(1)
        bind(p, job, d)
        go_on(d, job, 2, 3, reason=None)
        await asyncio.sleep(0.1)
        d.kill()
        job = (await p.jobs.wait_for(2))[1]
        assert job.output_ids == (1, 2, 3)
        assert made.asked.items[1].exclude == (d.ref,)
        p.tokens(job, 3, 4)
        go_on(d2, job, 5, index=4)
        assert text_of(await read(reply)) == "abcde"

    play(story)


def test_a_finish_that_died_with_its_worker_is_told_by_the_tokens() -> None:
    async def story(made: ScriptedCluster) -> None:
        p, d = made.workers["p"], made.workers["d"]
        reply = made.gateway.submit(generation(made, max_tokens=3))
        [job] = await p.jobs.wait_for(1)
        bind(p, job, d)
        go_on(d, job, 2, 3, reason=None)
        await asyncio.sleep(0.1)
        d.kill()
        deltas = await read(reply)
        assert (text_of(deltas), reasons(deltas)) == ("abc", ["length"])
        assert len(p.jobs.items) == 1

    play(story)


def test_the_end_token_tells_a_lost_finish_too() -> None:
    async def story(made: ScriptedCluster) -> None:
        p, d = made.workers["p"], made.workers["d"]
        reply = made.gateway.submit(generation(made))
        [job] = await p.jobs.wait_for(1)
        bind(p, job, d)
        go_on(d, job, 2, EOS, reason=None)
        await asyncio.sleep(0.1)
        d.kill()
        deltas = await read(reply)
        assert (text_of(deltas), reasons(deltas)) == ("ab", ["stop"])

    play(story)


def test_a_failed_transfer_excludes_both_ends_and_frees_the_other() -> None:
    async def story(made: ScriptedCluster) -> None:
        p, d = made.workers["p"], made.workers["d"]
        reply = made.gateway.submit(generation(made))
        [job] = await p.jobs.wait_for(1)
        bind(p, job, d)
        d.emit(job.gateway, FailedItem(job.key, "kv_transfer_failed", "peer lost", True))
        job = (await p.jobs.wait_for(2))[1]
        assert made.asked.items[1].exclude == (p.ref, d.ref)
        [abort] = await p.aborts.wait_for(1)
        assert (abort.key.attempt, abort.reason) == (1, "superseded")
        go_on(d, job, 2)
        assert text_of(await read(reply)) == "ab"

    play(story)
