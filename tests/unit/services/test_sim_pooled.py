"""The KV pool between workers, a whole cluster in virtual time.

What it saves, and that its faults cost nobody an answer; the tokens depend on every byte of KV.
"""

import asyncio
import re

import pytest

from common.engine.runner_fake import FakeModel
from common.messages.generation import SamplingParams
from services.gateway.request import ChoiceSpec, Generation
from tests.support.memory_pool import MemoryPool
from tests.support.sim_cluster import SimCluster
from tests.support.virtual_loop import run_virtual

MODEL = FakeModel()
SAMPLING = SamplingParams(max_tokens=12, seed=5)
PREFIX = [(3 * i) % MODEL.vocab_size for i in range(512)]
NUM_BLOCKS = len(PREFIX) // 16


def prompts(count: int) -> list[list[int]]:
    """They share a prefix of 512 tokens and go on differently."""
    return [[*PREFIX, *range(7 * n, 7 * n + 30 + n)] for n in range(count)]


def expected(asked: list[list[int]]) -> list[list[int]]:
    return [MODEL.expected_tokens(prompt, SAMPLING) for prompt in asked]


def computed(cluster: SimCluster) -> float:
    """Prompt tokens computed by all workers."""
    workers = cluster.workers.values()
    return float(sum(worker.metrics.prompt_tokens_computed._value.get() for worker in workers))


def received(cluster: SimCluster) -> float:
    workers = cluster.workers.values()
    return float(sum(worker.metrics.kv_received_tokens._value.get() for worker in workers))


def usable(cluster: SimCluster) -> int:
    """Workers that would ask the pool now."""
    told = [worker.metrics.exposition().decode() for worker in cluster.workers.values()]
    return sum(bool(re.search(r"^galley_pool_usable.* 1\.0$", text, re.M)) for text in told)


def make_cluster(pool: MemoryPool, prefill: int = 1, decode: int = 1) -> SimCluster:
    return SimCluster(prefill=prefill, decode=decode, topology="pooled", kv_pool=pool)


def test_what_one_prefill_computed_another_loads_and_every_decode_too() -> None:
    async def main() -> None:
        pool = MemoryPool()
        async with make_cluster(pool).running() as cluster:
            first, second = prompts(2)
            assert await cluster.ask(first, SAMPLING) == expected([first])[0]
            await asyncio.sleep(1)
            assert len(pool.objects) == len(first) // 16
        assert pool.loaded == 0
        async with make_cluster(pool).running() as cluster:
            assert await cluster.ask(second, SAMPLING) == expected([second])[0]
            assert computed(cluster) == received(cluster) == len(second) - len(PREFIX)
        assert pool.loaded == 2 * NUM_BLOCKS

    run_virtual(main())


def test_a_burst_with_one_prefix_loads_it_once_a_worker() -> None:
    asked = prompts(12)

    async def main() -> None:
        pool = MemoryPool(delay_s=0.1)
        async with make_cluster(pool).running() as cluster:
            await cluster.ask(PREFIX, SAMPLING)
        async with make_cluster(pool).running() as cluster:
            assert await cluster.ask_all(asked, SAMPLING) == expected(asked)
            assert computed(cluster) == sum(map(len, asked)) - len(asked) * len(PREFIX)
        assert pool.loaded == 2 * NUM_BLOCKS

    run_virtual(main())


def test_a_prefill_dies_and_the_next_goes_on_from_the_pool() -> None:
    prompt = [(11 * i) % MODEL.vocab_size for i in range(3000)]  # 12 steps of 256 tokens

    async def main() -> None:
        pool = MemoryPool()
        async with make_cluster(pool, prefill=2).running() as cluster:
            asking = asyncio.ensure_future(cluster.ask(prompt, SAMPLING))
            await asyncio.sleep(0.7)
            victim = next(w for w in cluster.workers.values() if w.host.worker.count("prefilling"))
            done = victim.metrics.prompt_tokens_computed._value.get()
            assert 1000 < done < 2900
            await cluster.kill(victim.ref.instance)
            async with asyncio.timeout(10):
                assert await asking == MODEL.expected_tokens(prompt, SAMPLING)
            assert computed(cluster) <= len(prompt) - done + 256

    run_virtual(main())


@pytest.mark.parametrize("fault", ["down", "slow", "damaged", "full"])
def test_a_faulty_pool_costs_nobody_the_answer(fault: str) -> None:
    asked = prompts(20)

    async def main() -> None:
        pool = MemoryPool()
        async with make_cluster(pool).running() as cluster:
            await cluster.ask(PREFIX, SAMPLING)
        pool.calls.clear()
        if fault == "down":
            pool.down = True
        elif fault == "slow":
            pool.delay_s = 1e9
        elif fault == "damaged":
            pool.damaged = set(list(pool.objects)[5:])
        else:
            pool.max_blocks = len(pool.objects)
        async with make_cluster(pool, decode=2).running() as cluster:
            async with asyncio.timeout(15):
                assert await cluster.ask_all(asked, SAMPLING) == expected(asked)
            if fault in ("down", "slow"):
                assert usable(cluster) < 3
                assert 0 < sum(pool.calls.values()) <= 3 * 5  # and not one for each request
            else:
                assert usable(cluster) == 3

    run_virtual(main())


def test_a_pool_that_comes_back_is_used_again() -> None:
    first, second = prompts(2)

    async def main() -> None:
        pool = MemoryPool()
        pool.down = True
        async with make_cluster(pool).running() as cluster:
            await cluster.ask(first, SAMPLING)
            pool.down = False
            await asyncio.sleep(40)
            await cluster.ask(second, SAMPLING)
            await asyncio.sleep(1)
            # Cached or not: all of the second prompt that is not in the pool is published now.
            assert len(pool.objects) == len(second) // 16

    run_virtual(main())


@pytest.mark.parametrize("topology", ["pooled", "chunked"])
def test_clients_that_leave_while_their_prefix_is_loaded_free_everything(topology: str) -> None:
    asked = prompts(20)

    async def main() -> None:
        pool = MemoryPool()
        async with make_cluster(pool).running() as cluster:
            await cluster.ask_all(asked, SAMPLING)
        pool.delay_s = 0.2
        cluster = SimCluster(decode=2, topology=topology, kv_pool=pool)  # type: ignore[arg-type]
        async with cluster.running():
            async with asyncio.TaskGroup() as tasks:
                for number, prompt in enumerate(asked):
                    tasks.create_task(leave(cluster, prompt, 0.05 * number))
            assert pool.calls["load"] > 0
            assert await cluster.ask_all(asked, SAMPLING) == expected(asked)

    run_virtual(main())


async def leave(cluster: SimCluster, prompt: list[int], after_s: float) -> None:
    choice = ChoiceSpec(0, tuple(prompt), SAMPLING)
    reply = cluster.gateway.submit(Generation(cluster.gateway.new_request_id(), (choice,)))
    try:
        async with asyncio.timeout(after_s):
            async for _ in reply:
                pass
    except TimeoutError:
        pass
    finally:
        reply.close()


@pytest.mark.parametrize(("topology", "worker"), [("pooled", "prefill-0"), ("chunked", "decode-0")])
def test_a_worker_tells_of_those_whose_prefix_is_being_loaded(topology: str, worker: str) -> None:
    [prompt] = prompts(1)

    async def main() -> None:
        pool = MemoryPool()
        async with make_cluster(pool).running() as cluster:
            await cluster.ask(prompt, SAMPLING)
            await asyncio.sleep(1)
        pool.delay_s = 0.5
        cluster = SimCluster(prefill=1, decode=1, topology=topology, kv_pool=pool)  # type: ignore[arg-type]
        async with cluster.running(), asyncio.TaskGroup() as tasks:
            asking = tasks.create_task(cluster.ask(prompt, SAMPLING))
            await asyncio.sleep(0.25)
            load = cluster.workers[worker].host.duty.load()
            assert (load.requests_waiting_for_kv, load.waiting_tokens) == (1, len(prompt))
            assert await asking == expected([prompt])[0]
            load = cluster.workers[worker].host.duty.load()
            assert (load.requests_waiting_for_kv, load.waiting_tokens) == (0, 0)

    run_virtual(main())


def test_decodes_that_prefill_share_a_pool_too() -> None:
    asked = prompts(8)

    async def main() -> None:
        pool = MemoryPool()
        for _ in range(2):
            async with SimCluster(decode=2, topology="chunked", kv_pool=pool).running() as cluster:
                assert await cluster.ask_all(asked, SAMPLING) == expected(asked)
        assert pool.loaded >= NUM_BLOCKS
        assert computed(cluster) < sum(len(prompt) - len(PREFIX) for prompt in asked)

    run_virtual(main())


def test_pools_too_small_for_loading_and_work_at_once_still_serve_all() -> None:
    asked = prompts(20)

    async def main() -> None:
        pool = MemoryPool(delay_s=0.05)
        async with make_cluster(pool).running() as cluster:
            await cluster.ask_all(asked, SAMPLING)
        cluster = make_cluster(pool)
        cluster.pools = {"prefill-0": 40, "decode-0": 44}
        async with cluster.running(), asyncio.timeout(200):
            assert await cluster.ask_all(asked, SAMPLING) == expected(asked)

    run_virtual(main())
