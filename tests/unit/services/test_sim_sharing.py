"""A decode shares what its prefix cache has and pulls only the rest: in virtual time, every byte checked."""

import asyncio

import pytest

from common.engine.runner_fake import FakeModel
from common.messages.generation import SamplingParams
from tests.support.sim_cluster import SimCluster
from tests.support.virtual_loop import run_virtual

MODEL = FakeModel()
SAMPLING = SamplingParams(max_tokens=20, seed=5)
PREFIX = [(3 * i) % MODEL.vocab_size for i in range(256)]


def received(cluster: SimCluster) -> float:
    return float(cluster.workers["decode-0"].metrics.kv_received_tokens._value.get())


@pytest.mark.parametrize(
    "tail", [[], [7], list(range(15)), list(range(16)), list(range(17)), list(range(40))]
)
def test_a_known_prefix_is_not_pulled_again(tail: list[int]) -> None:
    async def main() -> None:
        async with SimCluster().running() as cluster:
            await cluster.ask([*PREFIX, 1, 2, 3], SAMPLING)
            before = received(cluster)
            assert before == 259
            prompt = [*PREFIX, *tail]
            assert await cluster.ask(prompt, SAMPLING) == MODEL.expected_tokens(prompt, SAMPLING)
            assert received(cluster) - before == len(tail)

    run_virtual(main())


def test_many_share_one_prefix_in_a_pool_that_could_not_hold_it_for_each() -> None:
    prompts = [[*PREFIX, *range(n, n + 20)] for n in range(30)]

    async def main() -> None:
        cluster = SimCluster()
        cluster.pools["decode-0"] = 90  # 16 for the prefix and 4 for each of some 18
        async with cluster.running():
            await cluster.ask(PREFIX, SAMPLING)
            async with asyncio.timeout(60):
                answers = await cluster.ask_all(prompts, SAMPLING)
            assert answers == [MODEL.expected_tokens(prompt, SAMPLING) for prompt in prompts]
            assert received(cluster) == len(PREFIX) + 30 * 20

    run_virtual(main())


def test_a_pull_that_fails_leaves_shared_blocks_to_those_who_use_them() -> None:
    async def main() -> None:
        async with SimCluster(prefill=2).running() as cluster:
            await cluster.ask(PREFIX, SAMPLING)
            sampling = SamplingParams(max_tokens=100, seed=5)
            prompts = [[*PREFIX, *range(n, n + 40 * n)] for n in range(1, 12)]
            asking = asyncio.ensure_future(cluster.ask_all(prompts, sampling))
            await asyncio.sleep(0.1)
            await cluster.kill("prefill-0")
            async with asyncio.timeout(20):
                answers = await asking
            assert answers == [MODEL.expected_tokens(prompt, sampling) for prompt in prompts]

    run_virtual(main())
