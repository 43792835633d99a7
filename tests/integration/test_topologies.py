"""The same 60 requests in every topology, on real processes: the tokens are those of transformers.generate.

Greedy, float32, a tiny model. Prompts share their beginnings, and every sixth client leaves early.
"""

import random
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest

from bench.scrape import Snapshot
from deploy.local.presets import Preset
from tests.support.following import follow
from tests.support.real_cluster import MODEL, RealCluster, at_a_time, real_cluster
from tests.support.reference import Expected, generate
from tests.support.tiny_models import SPECIAL, make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

NUM_REQUESTS = 60
NUM_OUTPUT = 24
CONCURRENT = 16
BEGINNINGS = (300, 176, 96, 16)
"""Tokens that a quarter of the prompts each begin with; a block is 16."""
WORKERS: dict[Preset, tuple[int, int]] = {"pooled": (2, 2)}
"""Of prefill and decode, where it is not one each: what one publishes another is to load."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def expected(model: Path) -> list[Expected]:
    dice = random.Random(5)
    ids = range(len(SPECIAL), 259)
    beginnings = [dice.choices(ids, k=length) for length in BEGINNINGS]
    prompts = [
        tuple(beginnings[number % len(BEGINNINGS)] + dice.choices(ids, k=dice.randint(1, 60)))
        for number in range(NUM_REQUESTS)
    ]
    ordered = generate(model, prompts, NUM_OUTPUT)
    dice.shuffle(ordered)
    return ordered


@pytest.mark.parametrize("topology", get_args(Preset))
async def test_tokens_are_the_same_in_every_topology(
    model: Path, expected: list[Expected], topology: Preset, tmp_path: Path
) -> None:
    prefill, decode = WORKERS.get(topology, (1, 1))
    async with real_cluster(model, tmp_path, topology=topology, prefill=prefill, decode=decode) as cluster:
        await at_a_time(CONCURRENT, [request(cluster, number, one) for number, one in enumerate(expected)])
        await cluster.idle(within_s=5)
        if topology not in ("chunked", "colocated"):
            check_ways(topology, await cluster.metrics("prefill", "decode"))


def request(cluster: RealCluster, number: int, expected: Expected) -> Callable[[], Coroutine[Any, Any, None]]:
    return partial(leave if number % 6 == 0 else follow, cluster, expected)


async def leave(cluster: RealCluster, expected: Expected) -> None:
    """Read some of the answer and go."""
    body = {"model": MODEL, "prompt": list(expected.prompt), "max_tokens": 200, "stream": True}
    async with cluster.http.stream("POST", f"{cluster.url}/v1/completions", json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                return


def check_ways(topology: Preset, workers: Snapshot) -> None:
    """That KV travelled, was shared and was computed where the topology says."""
    assert workers.total("galley_kv_received_tokens_total") > 0
    computed = workers.total("galley_prompt_tokens_computed_total", role="decode")
    assert bool(computed) == (topology == "hybrid")
    loaded = workers.total("galley_pool_blocks_total", event="hit")
    assert bool(loaded) == (topology == "pooled")
