"""More than the pool holds: 32 prompts of 2,000 tokens where 12 have room. All end, with the right tokens.

Real processes, float32, a tiny model with a long context, compared with transformers.generate.
"""

import asyncio
import random
from pathlib import Path

import pytest

from tests.support.real_cluster import real_cluster
from tests.support.reference import Expected, generate
from tests.support.tiny_models import SPECIAL, make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

NUM_PROMPTS, PROMPT_TOKENS, NUM_OUTPUT = 32, 2000, 300
NUM_COMPARED = 6
ROOM = 12 * -(-(PROMPT_TOKENS + 1) // 16)
"""Blocks for twelve prompts and a token of each."""


def prompts() -> list[tuple[int, ...]]:
    source = random.Random(4)
    return [tuple(source.choices(range(len(SPECIAL), 259), k=PROMPT_TOKENS)) for _ in range(NUM_PROMPTS)]


async def test_all_end_right_in_a_pool_for_twelve(tmp_path: Path) -> None:
    directory = make_tiny_model("llama", tmp_path / "model", max_position_embeddings=4096)
    asked = prompts()
    compared = asked[:: NUM_PROMPTS // NUM_COMPARED][:NUM_COMPARED]
    expected = await asyncio.to_thread(generate, directory, compared, NUM_OUTPUT)
    run = tmp_path / "run"
    async with real_cluster(directory, run, topology="chunked", num_blocks=str(ROOM)) as cluster:
        answers = await asyncio.gather(*(cluster.greedy(prompt, NUM_OUTPUT) for prompt in asked))
        decode = await cluster.metrics("decode")
        await cluster.idle()
    outputs = dict(zip(asked, answers, strict=True))
    for one in expected:
        assert_same(one, outputs[one.prompt])
    assert len({tuple(answer) for answer in answers}) == NUM_PROMPTS
    assert decode.total("galley_requests_total", status="ok") == NUM_PROMPTS
    # Headroom spares outputs of up to 64 tokens any preemption; these are longer.
    assert decode.total("galley_preemptions_total") > 0
    assert decode.total("galley_recomputed_tokens_total") > 0


def assert_same(expected: Expected, got: list[int]) -> None:
    """Up to a tie that was decided the other way."""
    for position, (token, right) in enumerate(zip(expected.tokens, expected.right, strict=True)):
        assert got[position] in right, position
        if got[position] != token:
            return
