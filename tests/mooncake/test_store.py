"""The Mooncake Store as a KV pool: a real master, clients in processes of their own, either killed."""

import asyncio

import pytest

from tests.support.mooncake import CLIENT_TTL_S, pool_clients, running_master

pytestmark = pytest.mark.mooncake

TIMEOUT_S = 2.0
"""Of every call (open_pool's default)."""
MARGIN_S = 0.5
BLOCKS = 30


async def test_what_one_process_publishes_another_loads() -> None:
    async with running_master() as master, pool_clients() as clients:
        one, other = [await clients.start(master.url()) for _ in range(2)]
        assert await other.blocks("match", 0, BLOCKS) == 0
        assert await one.blocks("publish", 0, BLOCKS) == BLOCKS
        assert await one.blocks("publish", 0, BLOCKS) == BLOCKS
        assert await other.blocks("match", 0, BLOCKS + 5) == BLOCKS
        assert await other.blocks("load", 0, BLOCKS + 5) == BLOCKS
        assert await one.leave() == await other.leave() == 0


async def test_replicated_objects_survive_a_killed_client() -> None:
    async with running_master() as master, pool_clients() as clients:
        first, second, reader = [
            await clients.start(url)
            for url in (master.url(replicas=2), master.url(), master.url(segment="0"))
        ]
        await asyncio.gather(*(client.blocks("match", 0, 1) for client in (first, second)))
        assert await first.blocks("publish", 0, BLOCKS) == BLOCKS
        assert await second.blocks("publish", 100, BLOCKS) == BLOCKS  # one replica each, on either of them
        assert await reader.blocks("load", 100, BLOCKS) == BLOCKS
        await first.kill()
        answer, seconds = await reader.ask("load", 0, BLOCKS)
        assert isinstance(answer, int)  # a miss at worst, until the master has noticed
        assert seconds < TIMEOUT_S + MARGIN_S
        await reader.until(BLOCKS, "load", 0, BLOCKS, within_s=CLIENT_TTL_S + 10)
        assert await reader.blocks("load", 100, BLOCKS) < BLOCKS
        assert await second.blocks("publish", 100, BLOCKS) == BLOCKS
        assert await reader.blocks("load", 100, BLOCKS) == BLOCKS


async def test_a_master_that_is_gone_is_unavailable_and_usable_when_it_is_back() -> None:
    async with running_master() as master, pool_clients() as clients:
        one, other = [await clients.start(master.url()) for _ in range(2)]
        assert await one.blocks("publish", 0, BLOCKS) == BLOCKS
        assert await other.blocks("load", 0, BLOCKS) == BLOCKS
        await master.kill()
        for command in ("match", "load", "publish"):
            for client in (one, other):
                answer, seconds = await client.ask(command, 0, BLOCKS)
                assert isinstance(answer, str), answer
                assert seconds < TIMEOUT_S + MARGIN_S
        late = await clients.start(master.url())
        answer, seconds = await late.ask("load", 0, BLOCKS)
        assert "Connection refused" in str(answer)
        await master.start()
        await one.until(BLOCKS, "publish", 0, BLOCKS)
        await other.until(BLOCKS, "load", 0, BLOCKS)
        await late.until(BLOCKS, "load", 0, BLOCKS)


async def test_a_full_store_refuses_or_evicts_and_never_hangs() -> None:
    async with running_master() as master, pool_clients() as clients:
        client = await clients.start(master.url(segment="16MiB"))
        assert await client.blocks("publish", 0, 20) == 20
        there = await client.blocks("publish", 100, 60)
        assert 10 < there < 60  # 16 MiB hold 45 blocks
        assert await client.blocks("load", 100, there) > 5  # some may be evicted by now
