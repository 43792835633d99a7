"""Workers die, hang, fill up and go away, a whole cluster in virtual time: answers right, nothing left."""

import asyncio

import pytest

from common.config import GatewaySettings
from common.engine.runner_fake import FakeModel
from common.errors import GalleyError
from common.messages.generation import SamplingParams
from services.gateway.request import ChoiceSpec, Generation
from tests.support.sim_cluster import SimCluster
from tests.support.virtual_loop import run_virtual

MODEL = FakeModel()
SAMPLING = SamplingParams(max_tokens=40, seed=5)
PROMPTS = [[(13 * n + i) % MODEL.vocab_size for i in range(n)] for n in range(5, 400, 25)]
ANSWERS = [MODEL.expected_tokens(prompt, SAMPLING) for prompt in PROMPTS]


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
@pytest.mark.parametrize("after_s", [0.0, 0.03, 0.1, 0.3, 0.7])
def test_a_dead_worker_costs_nobody_the_answer(victim: str, after_s: float) -> None:
    async def main() -> None:
        async with SimCluster(prefill=2, decode=2).running() as cluster:
            asking = asyncio.ensure_future(cluster.ask_all(PROMPTS, SAMPLING))
            await asyncio.sleep(after_s)
            await cluster.kill(victim)
            async with asyncio.timeout(10):
                assert await asking == ANSWERS

    run_virtual(main())


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
def test_a_worker_that_hangs_is_left_after_three_seconds(victim: str) -> None:
    async def main() -> None:
        async with SimCluster(prefill=2, decode=2).running() as cluster:
            asking = asyncio.ensure_future(cluster.ask_all(PROMPTS, SAMPLING))
            await asyncio.sleep(0.1)
            cluster.workers[victim].control.disconnect()  # its beats stop, and it hears nobody
            async with asyncio.timeout(20):
                assert await asking == ANSWERS
            cluster.workers[victim].control.reconnect()
            await asyncio.sleep(5)

    run_virtual(main())


def test_a_prefill_that_comes_back_from_the_dead_lets_go_of_what_was_taken_from_it() -> None:
    """Its leases wait for room at a living decode, and nobody but the gateway knows that they are moot."""
    prompts = [[(n + 3 * i) % MODEL.vocab_size for i in range(300)] for n in range(8)]
    sampling = SamplingParams(max_tokens=200, seed=5)

    async def main() -> None:
        cluster = SimCluster(prefill=2, decode=1)
        cluster.pools["decode-0"] = 44  # for two of them
        async with cluster.running():
            asking = asyncio.ensure_future(cluster.ask_all(prompts, sampling))
            await asyncio.sleep(1)
            lost = cluster.workers["prefill-0"]
            assert lost.host.worker.held
            lost.control.disconnect()
            await asyncio.sleep(5)
            lost.control.reconnect()
            assert await asking == [MODEL.expected_tokens(prompt, sampling) for prompt in prompts]

    run_virtual(main())


def test_when_nobody_is_left_every_client_hears_it() -> None:
    async def main() -> None:
        async with SimCluster(prefill=1, decode=1).running() as cluster:
            asking = asyncio.ensure_future(cluster.ask_all(PROMPTS, SAMPLING))
            await asyncio.sleep(0.1)
            await cluster.kill("decode-0")
            async with asyncio.timeout(6):
                answers = await asking
            assert all(isinstance(answer, GalleyError) for answer in answers)
            assert {answer.status for answer in answers if isinstance(answer, GalleyError)} == {503}

    run_virtual(main())


def test_a_decode_pool_for_two_serves_a_burst_of_many() -> None:
    async def main() -> None:
        cluster = SimCluster(prefill=1, decode=1)
        cluster.pools["decode-0"] = 2 * (max(map(len, PROMPTS)) + 40) // 16 + 2
        async with cluster.running():
            async with asyncio.timeout(120):
                assert await cluster.ask_all(PROMPTS, SAMPLING) == ANSWERS

    run_virtual(main())


def test_a_prefill_pool_for_one_serves_a_burst_of_many() -> None:
    async def main() -> None:
        cluster = SimCluster(prefill=1, decode=1)
        cluster.pools["prefill-0"] = max(map(len, PROMPTS)) // 16 + 2
        async with cluster.running():
            async with asyncio.timeout(120):
                assert await cluster.ask_all(PROMPTS, SAMPLING) == ANSWERS

    run_virtual(main())


@pytest.mark.parametrize("length", [47, 48, 49, 62, 63])
def test_a_prompt_that_alone_fills_the_pool_runs_until_it_is_full(length: int) -> None:
    async def main() -> None:
        cluster = SimCluster()
        cluster.pools["decode-0"] = 4
        async with cluster.running():
            prompt = [(7 * i) % MODEL.vocab_size for i in range(length)]
            room = 4 * 16 + 1 - length  # the last token needs no KV
            assert await cluster.ask(prompt, SAMPLING) == MODEL.expected_tokens(prompt, SAMPLING)[:room]

    run_virtual(main())


@pytest.mark.parametrize("topology", ["disaggregated", "chunked"])
def test_clients_that_leave_at_any_moment_free_everything(topology: str) -> None:
    async def leave(cluster: SimCluster, number: int) -> None:
        choice = ChoiceSpec(0, tuple(PROMPTS[number % len(PROMPTS)]), SAMPLING)
        reply = cluster.gateway.submit(Generation(cluster.gateway.new_request_id(), (choice,)))
        try:
            async with asyncio.timeout(0.01 * number):
                async for _ in reply:
                    pass
        except TimeoutError:
            pass
        finally:
            reply.close()

    async def main() -> None:
        async with SimCluster(decode=2, topology=topology).running() as cluster:  # type: ignore[arg-type]
            await asyncio.gather(*(leave(cluster, number) for number in range(1, 120)))
            assert await cluster.ask_all(PROMPTS, SAMPLING) == ANSWERS

    run_virtual(main())


def test_one_token_needs_no_transfer() -> None:
    async def main() -> None:
        async with SimCluster().running() as cluster:
            sampling = SamplingParams(max_tokens=1, seed=5)
            answers = await cluster.ask_all(PROMPTS, sampling)
            assert answers == [MODEL.expected_tokens(prompt, sampling) for prompt in PROMPTS]
            assert "handoff" not in cluster.faults.seen

    run_virtual(main())


def test_a_stop_token_at_the_handoff_ends_both_sides() -> None:
    async def main() -> None:
        async with SimCluster().running() as cluster:
            first = ANSWERS[3][0]
            sampling = SamplingParams(max_tokens=40, seed=5, stop_token_ids=(first,))
            assert await cluster.ask(PROMPTS[3], sampling) == []  # what ended it is not shown
            assert cluster.faults.seen.get("handoff") == 1

    run_virtual(main())


def test_a_deadline_frees_both_sides() -> None:
    async def main() -> None:
        async with SimCluster(gateway_settings=GatewaySettings(request_timeout_s=0.5)).running() as cluster:
            answers = await cluster.ask_all(PROMPTS, SamplingParams(max_tokens=2000, seed=5))
            assert {type(answer).__name__ for answer in answers} == {"DeadlineExceeded"}

    run_virtual(main())


def test_a_client_that_leaves_is_counted_as_aborted_everywhere() -> None:
    async def main() -> None:
        async with SimCluster(prefill=1, decode=1).running() as cluster:
            choice = ChoiceSpec(0, tuple(PROMPTS[3]), SamplingParams(max_tokens=2000, seed=5))
            reply = cluster.gateway.submit(Generation(cluster.gateway.new_request_id(), (choice,)))
            while cluster.workers["decode-0"].host.worker.count("decoding") == 0:
                await anext(reply)
            reply.close()
            await asyncio.sleep(0.1)
            for metrics in (cluster.gateway.metrics, cluster.workers["decode-0"].host.worker.metrics):
                assert metrics.requests("aborted")._value.get() == 1
                assert metrics.requests_aborted("client")._value.get() == 1

    run_virtual(main())


def test_a_worker_that_is_told_to_stop_finishes_what_it_has() -> None:
    async def main() -> None:
        cluster = SimCluster(prefill=1, decode=2, drain_seconds=30)
        async with cluster.running():
            asking = asyncio.ensure_future(cluster.ask_all(PROMPTS, SAMPLING))
            await asyncio.sleep(0.3)
            worker = cluster.workers.pop("decode-0")
            worker.stopping.set()
            assert await asking == ANSWERS
            assert worker.task is not None
            await asyncio.wait_for(worker.task, 30)
            assert cluster.gateway.metrics.migrations._value.get() == 0

    run_virtual(main())


def test_the_bus_may_be_away_for_ten_seconds() -> None:
    async def main() -> None:
        async with SimCluster(prefill=2, decode=2).running() as cluster:
            asking = asyncio.ensure_future(cluster.ask_all(PROMPTS, SAMPLING))
            await asyncio.sleep(0.3)
            cluster.control.stop()
            await asyncio.sleep(10)
            cluster.control.start()
            async with asyncio.timeout(10):
                assert await asking == ANSWERS

    run_virtual(main())


def test_a_gateway_that_was_taken_for_dead_serves_on() -> None:
    """Workers do not hear its beats for a while: what they gave up is done again, new work is welcome."""

    async def main() -> None:
        async with SimCluster(prefill=2, decode=2).running() as cluster:
            assert await cluster.ask_all(PROMPTS, SAMPLING) == ANSWERS
            silence = cluster.faults.drop("beat.gateway", times=10_000)
            sampling = SamplingParams(max_tokens=300, seed=5)
            long = asyncio.ensure_future(cluster.ask(PROMPTS[0], sampling))
            await asyncio.sleep(4)
            assert silence.hits > 0
            cluster.faults.heal()
            async with asyncio.timeout(20):
                assert await long == MODEL.expected_tokens(PROMPTS[0], sampling)
                assert await cluster.ask_all(PROMPTS, SAMPLING) == ANSWERS

    run_virtual(main())


def test_a_stream_that_moves_to_a_pool_too_small_for_it_ends_with_what_it_has() -> None:
    async def main() -> None:
        cluster = SimCluster(prefill=0, decode=2, topology="chunked")
        cluster.pools["decode-1"] = 12
        async with cluster.running():
            sampling = SamplingParams(max_tokens=400, seed=5)
            prompt = PROMPTS[4]
            expected = MODEL.expected_tokens(prompt, sampling)
            asking = asyncio.ensure_future(cluster.ask(prompt, sampling))
            await asyncio.sleep(6)  # longer by now than decode-1 can hold
            assert cluster.workers["decode-0"].host.worker.held
            await cluster.kill("decode-0")
            answer = await asking
            assert answer == expected[: len(answer)]
            assert len(answer) > 12 * 16 - len(prompt)

    run_virtual(main())
