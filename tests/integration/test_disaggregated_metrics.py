"""A disaggregated request as the metrics of real processes show it: computed here, moved, decoded there."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from bench.scrape import Change
from common.kv.layout import KVLayout
from tests.support.real_cluster import RealCluster, real_cluster, settled
from tests.support.tiny_models import make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

NUM_PROMPT = 100
NUM_OUTPUT = 10
PROMPT = [3 + i * i % 250 for i in range(NUM_PROMPT)]
LAYOUT = KVLayout(kv_heads=3, num_layers=3, block_size=16, head_dim=16, dtype="float32")
KV_BYTES = 7 * LAYOUT.block_bytes
"""100 tokens are seven blocks of 16, the last of them not full; blocks move whole."""
CACHED = 96
"""The prompt's full blocks."""
TRANSPORTS = ("sm", "tcp")
"""Shared memory; sockets where a sandbox does not let processes share any."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RealCluster]:
    directory = make_tiny_model("llama", tmp_path_factory.mktemp("llama"))
    async with real_cluster(directory, tmp_path_factory.mktemp("run"), num_blocks="64") as cluster:
        yield cluster


async def changes(
    cluster: RealCluster, salt: str, max_tokens: int = NUM_OUTPUT
) -> tuple[int, dict[str, Change]]:
    """Ask for PROMPT once: the cached tokens that usage tells, and what each role counted meanwhile.

    Only what was asked with the same `salt` before may be in the cache.
    """
    before = {role: await cluster.metrics(role) for role in ("gateway", "prefill", "decode")}
    body = await cluster.complete(
        PROMPT, max_tokens=max_tokens, temperature=0, ignore_eos=True, cache_salt=salt
    )
    usage = body["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (NUM_PROMPT, max_tokens)
    await cluster.idle()
    counted = {role: Change(seen, await cluster.metrics(role)) for role, seen in before.items()}
    return int(usage["prompt_tokens_details"]["cached_tokens"]), counted


async def test_who_did_what(cluster: RealCluster) -> None:
    cached, counted = await changes(cluster, "once")
    gateway, prefill, decode = counted["gateway"], counted["prefill"], counted["decode"]
    assert cached == 0
    assert prefill.total("galley_prompt_tokens_computed_total") == NUM_PROMPT
    assert prefill.total("galley_generated_tokens_total") == 1
    assert decode.total("galley_prompt_tokens_computed_total") == 0
    assert decode.total("galley_recomputed_tokens_total") == 0
    assert decode.total("galley_generated_tokens_total") == NUM_OUTPUT - 1
    assert decode.total("galley_kv_received_tokens_total") == NUM_PROMPT
    for side in (prefill, decode):
        assert side.total("galley_kv_transfer_bytes_total") == KV_BYTES
        over = [side.total("galley_kv_transfer_bytes_total", transport=name) for name in TRANSPORTS]
        assert sum(over) == KV_BYTES
        assert side.total("galley_kv_transfer_failures_total") == 0
    assert decode.total("galley_kv_transfer_seconds_count") == 1
    assert 0 < decode.total("galley_kv_transfer_seconds_sum") < 10
    assert gateway.total("galley_prompt_tokens_total") == NUM_PROMPT
    assert gateway.total("galley_generated_tokens_total") == NUM_OUTPUT
    assert gateway.total("galley_requests_total", status="ok") == 1
    for seconds, count in (("ttft", 1), ("tpot", 1), ("itl", NUM_OUTPUT - 1)):
        assert gateway.total(f"galley_{seconds}_seconds_count") == count, seconds
        assert gateway.total(f"galley_{seconds}_seconds_sum") > 0, seconds


async def test_a_prompt_seen_before_is_computed_to_its_last_block_only(
    cluster: RealCluster,
) -> None:
    await changes(cluster, "twice")
    cached, counted = await changes(cluster, "twice")
    assert cached == CACHED
    assert counted["prefill"].total("galley_prompt_tokens_computed_total") == NUM_PROMPT - CACHED
    assert counted["prefill"].total("galley_prefix_cache_query_tokens_total") == NUM_PROMPT
    assert counted["prefill"].total("galley_prefix_cache_hit_tokens_total") == CACHED
    assert counted["decode"].total("galley_prompt_tokens_computed_total") == 0
    assert counted["decode"].total("galley_prefix_cache_hit_tokens_total") == CACHED
    assert counted["decode"].total("galley_kv_received_tokens_total") == NUM_PROMPT - CACHED
    assert counted["decode"].total("galley_kv_transfer_bytes_total") == LAYOUT.block_bytes


async def test_the_router_knows_what_is_cached(cluster: RealCluster) -> None:
    await changes(cluster, "known")

    async def difference() -> dict[str, float]:
        router, workers = await cluster.metrics("router"), await cluster.metrics("prefill", "decode")
        known = router.total("galley_prefix_index_blocks")
        cached = workers.total("galley_kv_blocks", state="cached")
        assert cached >= 2 * CACHED / LAYOUT.block_size
        return {"known": known, "cached": cached} if known != cached else {}

    await settled(difference, 5)


async def test_one_token_needs_no_decode(cluster: RealCluster) -> None:
    _, counted = await changes(cluster, "one token", max_tokens=1)
    assert counted["prefill"].total("galley_prompt_tokens_computed_total") == NUM_PROMPT
    for side in (counted["prefill"], counted["decode"]):
        assert side.total("galley_kv_transfer_bytes_total") == 0
    assert counted["decode"].total("galley_generated_tokens_total") == 0
    assert counted["gateway"].total("galley_ttft_seconds_count") == 1
    assert counted["gateway"].total("galley_tpot_seconds_count") == 0
