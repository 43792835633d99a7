"""Routers know what workers have cached, whatever messages are lost, whoever dies or starts anew."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from common.config import DecodeSettings
from common.engine.runner_fake import FakeModel
from common.messages.generation import SamplingParams
from common.routing.prefix_index import PrefixIndex
from services.router.service import RouterService
from tests.support.sim_cluster import SimCluster
from tests.support.virtual_loop import run_virtual

MODEL = FakeModel()
SAMPLING = SamplingParams(max_tokens=20, seed=5)
PROMPTS = [[(11 * n + i) % MODEL.vocab_size for i in range(n)] for n in (40, 200, 350)]
BEAT_S = 0.2


def assert_true(cluster: SimCluster, index: PrefixIndex) -> None:
    """The index says of every worker what its pool says."""
    for worker in cluster.workers.values():
        contents = worker.host.pool.contents()
        assert contents
        assert index.num_blocks(worker.ref) == len(contents)
        assert all(index.match([content]).get(worker.ref) == 1 for content in contents)
    assert index.total_blocks == sum(len(w.host.pool.contents()) for w in cluster.workers.values())


@asynccontextmanager
async def another_router(cluster: SimCluster) -> AsyncIterator[RouterService]:
    client, stopping = cluster.control.client(), asyncio.Event()
    await client.connect()
    router = cluster.make_router("router-1", client)
    running = asyncio.ensure_future(router.run(stopping))
    yield router
    stopping.set()
    await running


def test_what_is_cached_is_known_without_a_snapshot() -> None:
    async def main() -> None:
        async with SimCluster(prefill=2, decode=2).running() as cluster:
            await cluster.ask_all(PROMPTS * 2, SAMPLING)
            await asyncio.sleep(2 * BEAT_S)
            assert_true(cluster, cluster.router.index)
            assert cluster.faults.seen["kv.events"] > 4
            assert "kv.snapshot" not in cluster.faults.seen
            cached = {one["instance"]: one.get("cached_blocks") for one in cluster.router.fleet()}
            for name, worker in cluster.workers.items():
                assert cached[name] == len(worker.host.pool.contents())

    run_virtual(main())


@pytest.mark.parametrize(
    "lost", [("kv.events",), ("kv.events", "kv.snapshot.get"), ("kv.events", "kv.snapshot")], ids="+".join
)
@pytest.mark.parametrize("skip", [0, 1])
def test_a_lost_message_is_made_up_for_by_a_snapshot(lost: tuple[str, ...], skip: int) -> None:
    async def main() -> None:
        async with SimCluster().running() as cluster:
            rules = [cluster.faults.drop(kind, skip=skip if kind == "kv.events" else 0) for kind in lost]
            for prompt in PROMPTS:
                await cluster.ask(prompt, SAMPLING)
            await asyncio.sleep(4 * BEAT_S)
            assert [rule.hits for rule in rules] == [1] * len(lost)
            assert cluster.faults.seen["kv.snapshot"] >= 1
            assert_true(cluster, cluster.router.index)

    run_virtual(main())


def test_what_was_told_while_the_bus_was_lost_is_made_up_for() -> None:
    async def main() -> None:
        async with SimCluster(topology="chunked").running() as cluster:
            asking = asyncio.ensure_future(cluster.ask_all(PROMPTS, SAMPLING))
            await asyncio.sleep(0.1)
            worker = cluster.workers["decode-0"]
            worker.control.disconnect()
            await asyncio.sleep(1.0)
            missed = len(worker.host.pool.contents()) - cluster.router.index.num_blocks(worker.ref)
            assert missed > 0
            worker.control.reconnect()
            await asyncio.sleep(2 * BEAT_S)
            assert_true(cluster, cluster.router.index)
            await asking

    run_virtual(main())


def test_evictions_are_told_and_snapshots_travel_in_parts() -> None:
    async def main() -> None:
        async with SimCluster(num_blocks=40).running() as cluster:
            cluster.control.max_payload = 1024 + 8 * 32  # eight blocks a message
            cluster.faults.drop("kv.events", times=2, skip=3)
            for start in range(6):
                await cluster.ask([start + i for i in range(300)], SAMPLING)
            await asyncio.sleep(4 * BEAT_S)
            assert_true(cluster, cluster.router.index)
            async with another_router(cluster) as router:
                before = cluster.faults.seen.get("kv.snapshot", 0)
                await asyncio.sleep(2 * BEAT_S)
                assert cluster.faults.seen["kv.snapshot"] - before >= 5
                assert_true(cluster, router.index)

    run_virtual(main())


def test_a_new_router_is_warm_after_two_beats() -> None:
    async def main() -> None:
        async with SimCluster(prefill=2, decode=2).running() as cluster:
            await cluster.ask_all(PROMPTS * 2, SAMPLING)
            await asyncio.sleep(2 * BEAT_S)
            async with another_router(cluster) as router:
                await asyncio.sleep(2 * BEAT_S)
                assert_true(cluster, router.index)
            assert_true(cluster, cluster.router.index)

    run_virtual(main())


def test_the_dead_have_nothing_cached_and_the_new_start_with_nothing() -> None:
    async def main() -> None:
        async with (
            SimCluster(topology="chunked", decode=2).running() as cluster,
            asyncio.TaskGroup() as tasks,
        ):
            await cluster.ask_all(PROMPTS * 2, SAMPLING)
            await asyncio.sleep(2 * BEAT_S)
            dead = cluster.workers["decode-0"].ref
            assert cluster.router.index.num_blocks(dead)
            await cluster.kill("decode-0")
            await asyncio.sleep(4)
            assert cluster.router.index.num_blocks(dead) == 0
            assert_true(cluster, cluster.router.index)
            new = cluster.start(tasks, cluster.settings(DecodeSettings, "decode-0"))
            await asyncio.sleep(1)
            assert cluster.router.index.num_blocks(new.ref) == 0
            await cluster.ask_all(PROMPTS * 2, SAMPLING)
            await asyncio.sleep(2 * BEAT_S)
            assert_true(cluster, cluster.router.index)
            new.stopping.set()
            del cluster.workers["decode-0"]

    run_virtual(main())
