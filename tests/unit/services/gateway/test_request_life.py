"""A request that goes well, and what ends it from the client's side; in virtual time."""

import asyncio

import pytest

from common.config import GatewaySettings
from common.errors import (
    DeadlineExceeded,
    NoInstance,
    Overloaded,
)
from common.messages.stream import (
    BoundItem,
)
from services.gateway.request import Delta
from tests.support.scripted_cluster import (
    ScriptedCluster,
    bind,
    generation,
    go_on,
    play,
    read,
    reasons,
    text_of,
)


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


def test_no_first_token_in_time() -> None:
    async def story(made: ScriptedCluster) -> None:
        started = made.loop.time()
        with pytest.raises(DeadlineExceeded, match="first token"):
            await read(made.gateway.submit(generation(made)))
        assert made.loop.time() - started == pytest.approx(5, abs=0.01)
        [abort] = await made.workers["p"].aborts.wait_for(1)
        assert abort.reason == "deadline"

    play(story, settings=GatewaySettings(first_token_timeout_s=5))


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

    play(story, settings=GatewaySettings(first_token_timeout_s=5, request_timeout_s=10))


def test_the_deadline_passes_while_routing() -> None:
    async def story(made: ScriptedCluster) -> None:
        made.hub.fate = lambda subject, _: None if "route" in subject else 0.0
        with pytest.raises(DeadlineExceeded):
            await read(made.gateway.submit(generation(made)))

    play(story, settings=GatewaySettings(first_token_timeout_s=0.3))


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

    play(story, settings=GatewaySettings(max_unread_bytes=2500))


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
        made.router_ready = False
        await asyncio.sleep(0.3)
        assert "instance" in made.gateway.why_not_ready()
        made.router_ready = True
        await asyncio.sleep(0.3)
        assert made.gateway.why_not_ready() == ""
        made.hub.stop()
        assert "bus" in made.gateway.why_not_ready()
        made.hub.start()

    play(story)


def test_a_gateway_that_is_cancelled_tells_its_readers() -> None:
    async def story(made: ScriptedCluster) -> None:
        reply = made.gateway.submit(generation(made))
        await made.workers["p"].jobs.wait_for(1)
        made.serving.cancel()
        with pytest.raises(NoInstance, match="shutting down"):
            await read(reply)

    play(story)
