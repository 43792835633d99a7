"""A request's life in the gateway, every way it can go, in virtual time over the in-memory bus."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from common.errors import (
    AttemptsExhausted,
    ContextLengthExceeded,
    DeadlineExceeded,
    GalleyError,
    NoInstance,
    Overloaded,
    WorkerFailed,
)
from common.ids import RequestId
from common.messages.generation import Accepted, Job, Refused, Rejected, Route
from common.messages.stream import (
    BoundItem,
    DecodingItem,
    FailedItem,
    FinishItem,
    FrameItem,
    PrefillStats,
    TokensItem,
)
from services.gateway.gateway import Limits
from services.gateway.request import Delta
from tests.support.faulty import Faults
from tests.support.scripted_cluster import (
    EOS,
    ScriptedCluster,
    ScriptedWorker,
    cluster,
    generation,
    read,
    reasons,
    text_of,
)
from tests.support.virtual_loop import run_virtual

Story = Callable[[ScriptedCluster], Awaitable[None]]


def play(story: Story, *, faults: Faults | None = None, limits: Limits | None = None) -> None:
    async def main() -> None:
        async with cluster(faults or Faults(), limits) as made:
            await story(made)

    run_virtual(main(), limit_s=300)


def bind(prefill: ScriptedWorker, job: Job, decode: ScriptedWorker) -> None:
    """What a prefill sends: bound, and the first token, "a"."""
    prefill.emit(job.gateway, BoundItem(job.key, decode.ref))
    prefill.emit(job.gateway, TokensItem(job.key, 0, (1,), prefill=PrefillStats(2, 1.0, 2.0)))


def go_on(decode: ScriptedWorker, job: Job, *ids: int, index: int = 1, reason: str | None = "length") -> None:
    """What a decode sends: decoding, tokens from `index`, and the finish."""
    items: list[FrameItem] = [DecodingItem(job.key, 1.0, 100), TokensItem(job.key, index, ids)]
    if reason is not None:
        stop_token = ids[-1] if reason == "stop" else None
        items.append(FinishItem(job.key, reason, index + len(ids), stop_token))  # type: ignore[arg-type]
    decode.emit(job.gateway, *items)


def test_a_split_request_from_job_to_finish() -> None:
    async def story(made: ScriptedCluster) -> None:
        p, d = made.workers["p"], made.workers["d"]
        reply = made.gateway.submit(generation(made))
        [job] = await p.jobs.wait_for(1)
        assert (job.prompt_ids, job.output_ids, job.worker, job.decode) == ((1, 2, 3), (), p.ref, d.ref)
        assert (job.key.attempt, job.key.choice) == (1, 0)
        bind(p, job, d)
        go_on(d, job, 2, 3)
        deltas = await read(reply)
        assert (text_of(deltas), reasons(deltas)) == ("abc", ["length"])
        usage = reply.usage
        assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (3, 3, 2)
        await asyncio.sleep(1)
        assert p.acknowledged == 2
        assert d.acknowledged == 1
        assert not p.aborts.items
        assert not d.aborts.items

    play(story)


def test_the_end_token_counts_but_is_not_shown() -> None:
    async def story(made: ScriptedCluster) -> None:
        p, d = made.workers["p"], made.workers["d"]
        reply = made.gateway.submit(generation(made, stop_token_ids=(26,)))
        [job] = await p.jobs.wait_for(1)
        bind(p, job, d)
        go_on(d, job, 2, 26, reason="stop")
        deltas = await read(reply)
        assert (text_of(deltas), reasons(deltas), reply.usage.completion_tokens) == ("ab", ["stop"], 3)
        assert [token.id for delta in deltas for token in delta.tokens] == [1, 2]

    play(story)


def test_each_choice_is_a_job_with_its_own_attempt_number() -> None:
    async def story(made: ScriptedCluster) -> None:
        p, d = made.workers["p"], made.workers["d"]
        reply = made.gateway.submit(generation(made, n=3))
        jobs = await p.jobs.wait_for(3)
        assert [(job.key.attempt, job.key.choice) for job in jobs] == [(1, 0), (2, 1), (3, 2)]
        for job in reversed(jobs):
            bind(p, job, d)
            go_on(d, job, 5 + job.key.choice)
        deltas = await read(reply)
        assert [text_of(deltas, choice) for choice in range(3)] == ["ae", "af", "ag"]
        assert reply.usage.completion_tokens == 6
        assert reply.usage.prompt_tokens == 3

    play(story)


def test_a_stop_string_ends_decode_and_leaks_nothing() -> None:
    async def story(made: ScriptedCluster) -> None:
        p, d = made.workers["p"], made.workers["d"]
        reply = made.gateway.submit(generation(made, stop=("cd",)))
        [job] = await p.jobs.wait_for(1)
        bind(p, job, d)
        go_on(d, job, 2, 3, 4, 5, reason=None)
        deltas = await read(reply)
        assert (text_of(deltas), reasons(deltas)) == ("ab", ["stop"])
        assert reply.usage.completion_tokens == 4
        [abort] = await d.aborts.wait_for(1)
        assert abort.reason == "stop"
        assert abort.key == job.key

    play(story)


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


@pytest.mark.parametrize("reason", ["full", "draining", "stale", "mismatch"])
def test_a_refused_job_goes_elsewhere_at_once(reason: str) -> None:
    async def story(made: ScriptedCluster) -> None:
        p, d = made.workers["p"], made.workers["d"]
        p2 = made.worker("p2", "prefill")
        p.answer = lambda _: Refused(reason, "no")  # type: ignore[arg-type]
        made.routes = [Route(p.ref, d.ref), Route(p2.ref, d.ref)]
        started = made.loop.time()
        reply = made.gateway.submit(generation(made))
        [job] = await p2.jobs.wait_for(1)
        assert made.loop.time() - started < 0.01 or made.loop.time() - started < 0.3
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

    play(story, limits=Limits(max_attempts=3))


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


def test_no_first_token_in_time() -> None:
    async def story(made: ScriptedCluster) -> None:
        started = made.loop.time()
        with pytest.raises(DeadlineExceeded, match="first token"):
            await read(made.gateway.submit(generation(made)))
        assert made.loop.time() - started == pytest.approx(5, abs=0.01)
        [abort] = await made.workers["p"].aborts.wait_for(1)
        assert abort.reason == "deadline"

    play(story, limits=Limits(first_token_timeout_s=5))


def test_the_deadline_ends_a_running_stream_after_its_text() -> None:
    async def story(made: ScriptedCluster) -> None:
        p, d = made.workers["p"], made.workers["d"]
        reply = made.gateway.submit(generation(made))
        [job] = await p.jobs.wait_for(1)
        bind(p, job, d)
        go_on(d, job, 2, reason=None)
        seen: list[Delta] = []
        with pytest.raises(DeadlineExceeded):
            await read(reply, seen)
        assert text_of(seen) == "ab"
        assert await d.aborts.wait_for(1)
        assert await p.aborts.wait_for(1)

    play(story, limits=Limits(first_token_timeout_s=5, request_timeout_s=10))


def test_the_deadline_passes_while_routing() -> None:
    async def story(made: ScriptedCluster) -> None:
        made.hub.fate = lambda subject, _: None if "route" in subject else 0.0
        with pytest.raises(DeadlineExceeded):
            await read(made.gateway.submit(generation(made)))

    play(story, limits=Limits(first_token_timeout_s=0.3))


def test_a_client_that_leaves_ends_both_workers_and_the_abort_is_repeated() -> None:
    async def story(made: ScriptedCluster) -> None:
        p, d = made.workers["p"], made.workers["d"]
        d.answers_aborts = False
        reply = made.gateway.submit(generation(made))
        [job] = await p.jobs.wait_for(1)
        bind(p, job, d)
        await asyncio.sleep(0.1)
        reply.close()
        left = made.loop.time()
        aborts = await d.aborts.wait_for(3)
        assert {(abort.key, abort.reason) for abort in aborts} == {(job.key, "client")}
        assert made.loop.time() - left == pytest.approx(1.0, abs=0.01)
        d.answers_aborts = True
        await d.aborts.wait_for(4)
        await asyncio.sleep(5)
        assert len(d.aborts.items) == 4
        assert len(p.aborts.items) == 1
        reply.close()

    play(story)


def test_a_slow_reader_loses_its_request_only() -> None:
    async def story(made: ScriptedCluster) -> None:
        p = made.workers["p"]
        lost = asyncio.Event()
        reply = made.gateway.submit(generation(made, max_tokens=100))
        reply.on_lost = lost.set
        [job] = await p.jobs.wait_for(1)
        for index in range(12):
            p.tokens(job, index, 1)
        async with asyncio.timeout(1):
            await lost.wait()
        with pytest.raises(Overloaded, match="slow"):
            await read(reply)
        assert await p.aborts.wait_for(1)
        assert (
            made.metrics.registry.get_sample_value(
                "galley_requests_aborted_total",
                {"instance": "gw", "role": "gateway", "reason": "slow_reader"},
            )
            == 1.0
        )

    play(story, limits=Limits(max_waiting=10))


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


def test_stages_add_up_to_requests_in_flight() -> None:
    async def story(made: ScriptedCluster) -> None:
        p, d = made.workers["p"], made.workers["d"]

        def gauges() -> list[float | None]:
            names = ("queued", "prefilling", "waiting_for_kv", "decoding", "in_flight")
            labels = {"instance": "gw", "role": "gateway"}
            read_value = made.metrics.registry.get_sample_value
            return [read_value(f"galley_requests_{name}", labels) for name in names]

        reply = made.gateway.submit(generation(made))
        [job] = await p.jobs.wait_for(1)
        assert gauges() == [1, 0, 0, 0, 1]
        p.emit(job.gateway, BoundItem(job.key, d.ref))
        await asyncio.sleep(0.01)
        assert gauges() == [0, 1, 0, 0, 1]
        p.tokens(job, 0, 1)
        await asyncio.sleep(0.01)
        assert gauges() == [0, 0, 1, 0, 1]
        go_on(d, job, 2, reason=None)
        await asyncio.sleep(0.01)
        assert gauges() == [0, 0, 0, 1, 1]
        go_on(d, job, 3, index=2)
        await read(reply)
        assert gauges() == [0, 0, 0, 0, 0]

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


def test_drain_waits_for_what_runs_and_refuses_what_is_new() -> None:
    async def story(made: ScriptedCluster) -> None:
        p, d = made.workers["p"], made.workers["d"]
        reply = made.gateway.submit(generation(made))
        [job] = await p.jobs.wait_for(1)
        draining = asyncio.create_task(made.gateway.drain(30))
        await asyncio.sleep(0.1)
        with pytest.raises(NoInstance, match="shutting down"):
            made.gateway.submit(generation(made))
        bind(p, job, d)
        go_on(d, job, 2)
        assert text_of(await read(reply)) == "ab"
        await draining

    play(story)


def test_readiness_says_what_is_missing() -> None:
    async def story(made: ScriptedCluster) -> None:
        assert made.gateway.why_not_ready() == ""
        made.workers["p"].kill()
        await asyncio.sleep(1)
        assert "prefill" in made.gateway.why_not_ready()
        made.workers["d"].kill()
        await asyncio.sleep(1)
        assert "decode" in made.gateway.why_not_ready()
        made.hub.stop()
        assert "bus" in made.gateway.why_not_ready()
        made.hub.start()

    play(story)
