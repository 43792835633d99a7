"""Two prefill and two decode workers over a real Mooncake Store share prefixes, which survive one of them."""

import random
from collections.abc import Mapping
from pathlib import Path

import pytest

from bench.scrape import Change
from tests.support.mooncake import MooncakeMaster, running_master
from tests.support.real_cluster import RealCluster, real_cluster, settled
from tests.support.tiny_models import SPECIAL, make_tiny_model

pytestmark = [pytest.mark.mooncake, pytest.mark.slow]

WORKERS = 4
BLOCKS = 20
"""Of 16 tokens, in a prefix."""
REST = 5
"""Tokens of a prompt that fill no block."""
NUM_OUTPUT = 8
PREFIXES = 3
"""Odd, so that in turn each prefill gets what the other one had computed."""
WITHIN_S = 10.0


def make_prompts(dice: random.Random) -> list[list[int]]:
    return [dice.choices(range(len(SPECIAL), 259), k=16 * BLOCKS + REST) for _ in range(PREFIXES)]


async def ask(cluster: RealCluster, prompts: list[list[int]]) -> list[list[int]]:
    """Their greedy tokens, one prompt after the other."""
    answers = [await cluster.greedy(prompt, NUM_OUTPUT) for prompt in prompts]
    await cluster.idle()
    return answers


async def until_published(cluster: RealCluster, prefixes: int) -> None:
    async def missing() -> Mapping[str, float]:
        seen = await cluster.metrics("prefill", "decode")
        published = seen.total("galley_pool_blocks_total", event="published")
        return {"blocks": BLOCKS * prefixes - published} if published < BLOCKS * prefixes else {}

    await settled(missing, WITHIN_S)


async def until_forgotten(master: MooncakeMaster, alive: int) -> None:
    async def too_many() -> Mapping[str, float]:
        left = await master.clients() - alive
        return {"clients": left} if left else {}

    await settled(too_many, WITHIN_S)


async def test_prefixes_are_shared_and_survive_a_killed_worker(tmp_path: Path) -> None:
    model = make_tiny_model("llama", tmp_path / "model")
    shared, kept = make_prompts(random.Random(1)), make_prompts(random.Random(2))
    async with (
        running_master() as master,
        real_cluster(
            model,
            tmp_path / "run",
            topology="pooled",
            prefill=2,
            decode=2,
            kv_pool=master.url(segment="64MiB", replicas=2),
            routing_policy="round_robin",
        ) as cluster,
    ):
        before = await cluster.metrics("prefill")
        first = await ask(cluster, shared)
        await until_published(cluster, PREFIXES)
        assert await ask(cluster, shared) == first
        workers = Change(before, await cluster.metrics("prefill"))
        # Computed by one of them, once; the other one loaded it.
        assert workers.total("galley_pool_blocks_total", event="hit") == PREFIXES * BLOCKS
        assert workers.total("galley_pool_bytes_total", direction="loaded") > 0
        computed = workers.total("galley_prompt_tokens_computed_total")
        assert computed == PREFIXES * (16 * BLOCKS + 2 * REST)
        decodes = await cluster.metrics("decode")
        assert decodes.total("galley_pool_blocks_total", event="hit") > 0

        answers = await ask(cluster, kept)
        await until_published(cluster, 2 * PREFIXES)
        assert await master.clients() == WORKERS
        cluster.kill("prefill-0")
        await until_forgotten(master, WORKERS - 1)
        before = await cluster.metrics("prefill")
        assert await ask(cluster, kept) == answers
        survivor = Change(before, await cluster.metrics("prefill"))
        # It had computed some of them itself; all that the killed one had computed came from the pool.
        assert survivor.total("galley_pool_blocks_total", event="hit") >= BLOCKS
        assert survivor.total("galley_prompt_tokens_computed_total") == PREFIXES * REST
        seen = await cluster.metrics("prefill", "decode")
        assert seen.total("galley_pool_blocks_total", event="corrupt") == 0
        assert seen.total("galley_pool_unavailable_total") == 0
