"""Routing in a whole cluster in virtual time: prefixes found, pairs kept, budgets kept or refused early."""

import asyncio
from collections import Counter

from common.engine.runner_fake import FakeModel
from common.errors import GalleyError, Overloaded
from common.messages.generation import SLO, SamplingParams
from tests.support.sim_cluster import SimCluster
from tests.support.virtual_loop import run_virtual

MODEL = FakeModel()
SAMPLING = SamplingParams(max_tokens=8, seed=0, temperature=0.0)


def prompt(number: int, length: int = 320) -> list[int]:
    return [(31 * number + i) % 1000 for i in range(length)]


def hit_tokens(cluster: SimCluster) -> dict[str, float]:
    return {
        name: worker.metrics.registry.get_sample_value(
            "galley_prefix_cache_hit_tokens_total", {"instance": name, "role": worker.host.worker.info.role}
        )
        or 0.0
        for name, worker in cluster.workers.items()
    }


def served(cluster: SimCluster) -> Counter[str]:
    return Counter(
        {
            name: int(
                worker.metrics.registry.get_sample_value(
                    "galley_requests_total", {"instance": name, "role": "decode", "status": "ok"}
                )
                or 0
            )
            for name, worker in cluster.workers.items()
        }
    )


def test_second_turns_go_where_the_first_was() -> None:
    """Eight conversations over four workers: with prefix_aware every second turn finds its first."""

    async def hits(policy: str) -> float:
        cluster = SimCluster(topology="chunked", decode=4, router_settings={"routing_policy": policy})
        async with cluster.running():
            for turn in (320, 336):
                for number in (0, 1, 2, 3, 4, 5, 6, 7):
                    tokens = await cluster.ask(prompt(number, turn), SAMPLING)
                    assert tokens == MODEL.expected_tokens(prompt(number, turn), SAMPLING)
                await asyncio.sleep(0.5)  # beats tell what is cached
                await cluster.ask(prompt(99), SAMPLING)  # one more, so that turns do not come out by luck
        return sum(hit_tokens(cluster).values())

    assert run_virtual(hits("prefix_aware")) >= 8 * 320
    assert run_virtual(hits("least_predicted_ttft")) >= 8 * 320
    assert run_virtual(hits("round_robin")) < 4 * 320


def test_a_prompt_that_a_decode_knows_goes_straight_there() -> None:
    async def main() -> None:
        settings = {"routing_policy": "prefix_aware", "local_prefill_below_tokens": 64}
        cluster = SimCluster(prefill=1, decode=2, router_settings=settings)
        async with cluster.running():
            for length in (320, 340):
                expected = MODEL.expected_tokens(prompt(1, length), SAMPLING)
                assert await cluster.ask(prompt(1, length), SAMPLING) == expected
                await asyncio.sleep(0.5)
            prefill = cluster.workers["prefill-0"].metrics.registry
            name = "galley_prompt_tokens_computed_total"
            assert prefill.get_sample_value(name, {"instance": "prefill-0", "role": "prefill"}) == 320
            assert sum(hit_tokens(cluster).values()) == 320
            assert hit_tokens(cluster)["prefill-0"] == 0

    run_virtual(main())


def test_pairs_hold_in_the_cluster() -> None:
    async def main() -> None:
        settings = {"pairs": {"prefill-*": ("decode-1",)}}
        cluster = SimCluster(prefill=2, decode=2, router_settings=settings)
        async with cluster.running():
            answers = await cluster.ask_all([prompt(n) for n in range(10)], SAMPLING)
            assert answers == [MODEL.expected_tokens(prompt(n), SAMPLING) for n in range(10)]
        assert served(cluster)["decode-0"] == 0
        assert served(cluster)["decode-1"] == 10

    run_virtual(main())


def test_early_rejection_keeps_the_promises_that_were_made() -> None:
    """A burst that takes 6 s to prefill, with a budget of 2 s: whoever is admitted has his token in time, the
    others know at once, and come back when they were told to."""
    budget, waits, refusals = 2.0, list[float](), list[float]()

    async def ask(cluster: SimCluster, number: int) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            begun = clock()
            reply = cluster.submit(prompt(number), SAMPLING, slo=SLO(ttft_s=budget))
            try:
                async for _ in reply:
                    return waits.append(clock() - begun)
            except Overloaded as error:
                refusals.append(clock() - begun)
                await asyncio.sleep(error.retry_after_s or 0.0)
            finally:
                reply.close()

    async def main() -> None:
        cluster = SimCluster(prefill=1, decode=2, num_blocks=4096)
        async with cluster.running():
            for number in range(900, 908):  # the worker learns what its steps take
                await cluster.ask(prompt(number, 40 * (number - 899)), SAMPLING)
            await asyncio.sleep(0.5)
            await asyncio.gather(*(ask(cluster, number) for number in range(100)))

    run_virtual(main())
    assert len(waits) == 100
    assert max(waits) <= 1.1 * budget
    assert sum(wait <= budget for wait in waits) >= 95
    assert len(refusals) >= 60
    assert max(refusals) < 0.01


def test_an_idle_cluster_refuses_nobody() -> None:
    async def main() -> None:
        cluster = SimCluster(prefill=1, decode=1)
        async with cluster.running():
            for number in range(5):
                await cluster.ask(prompt(number), SAMPLING, slo=SLO(0.001, 0.0001))
                await asyncio.sleep(0.5)

    run_virtual(main())


def test_a_rejection_is_an_overload_with_a_time_to_come_back() -> None:
    async def main() -> None:
        cluster = SimCluster(topology="chunked", decode=1)
        async with cluster.running():
            await cluster.ask(prompt(0), SAMPLING)
            busy = asyncio.create_task(cluster.ask(prompt(1, 2000), SAMPLING))
            await asyncio.sleep(0.5)
            answer: object = None
            try:
                await cluster.ask(prompt(2), SAMPLING, slo=SLO(ttft_s=0.05))
            except GalleyError as error:
                answer = error
            assert isinstance(answer, Overloaded)
            assert answer.status == 429
            assert answer.retry_after_s is not None
            assert 0 < answer.retry_after_s < 5
            await busy

    run_virtual(main())
