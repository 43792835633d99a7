"""A pool too short for what comes: everybody ends, with the right tokens, in turn, and it is counted."""

import asyncio
import re

from common.engine.runner_fake import FakeModel
from common.engine.scheduler import Scheduler
from common.messages.generation import SamplingParams
from tests.support.sim_cluster import SimCluster
from tests.support.virtual_loop import run_virtual

MODEL = FakeModel(max_model_len=4096)
PROMPTS = [[(7 * number + i) % 1000 for i in range(2000)] for number in range(32)]


async def overload(max_tokens: int) -> Scheduler:
    """32 prompts of 2,000 tokens at once, in a pool for 12 of them; the scheduler, when all is over."""
    num_blocks = 12 * MODEL.layout.blocks_for(2001)
    cluster = SimCluster(topology="chunked", model=MODEL, num_blocks=num_blocks)
    sampling = SamplingParams(max_tokens=max_tokens, seed=0, temperature=0.0)
    ended: list[int] = []

    async def ask(number: int) -> list[int]:
        tokens = await cluster.ask(PROMPTS[number], sampling)
        ended.append(number)
        return tokens

    async with cluster.running():
        answers = await asyncio.gather(*map(ask, range(len(PROMPTS))))
    assert answers == [MODEL.expected_tokens(prompt, sampling) for prompt in PROMPTS]
    assert ended == list(range(len(PROMPTS)))
    worker = cluster.workers["decode-0"]
    scheduler = worker.host.engine.scheduler
    metrics = worker.metrics.exposition().decode()
    for name in ("preemptions", "recomputed_tokens"):
        assert counter(metrics, name) == getattr(scheduler, f"num_{name}")
    return scheduler


def counter(metrics: str, name: str) -> float:
    (line,) = re.findall(rf"^galley_{name}_total\{{[^}}]*\}} (\S+)$", metrics, re.M)
    return float(line)


def test_everybody_ends_in_turn_and_headroom_spares_preemptions() -> None:
    assert run_virtual(overload(max_tokens=64)).num_preemptions == 0


def test_long_outputs_preempt_and_end_right_all_the_same() -> None:
    scheduler = run_virtual(overload(max_tokens=300))
    assert 0 < scheduler.num_preemptions <= 6
    assert 0 < scheduler.num_recomputed_tokens <= 6 * 2300
