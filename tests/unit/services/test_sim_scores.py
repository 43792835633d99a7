"""Log probabilities of prompts in every topology, in virtual time: FakeModel's, past the prefix cache."""

import asyncio
from dataclasses import replace

import pytest

from common.config import Topology
from common.engine.runner_fake import FakeModel
from common.messages.generation import SamplingParams
from common.messages.stream import TokenLogprobs
from services.gateway.request import ChoiceSpec, Generation
from tests.support.sim_cluster import SimCluster
from tests.support.virtual_loop import run_virtual

MODEL = FakeModel()
SCORED = SamplingParams(6, 7, temperature=0.0, prompt_logprobs=2)


async def ask(
    cluster: SimCluster, prompt: tuple[int, ...], sampling: SamplingParams
) -> tuple[list[TokenLogprobs], list[int], int]:
    """Scores, output tokens, and cached tokens."""
    generation = Generation(cluster.gateway.new_request_id(), (ChoiceSpec(0, prompt, sampling),))
    reply = cluster.gateway.submit(generation)
    deltas = [delta async for batch in reply for delta in batch]
    scores = [one for delta in deltas for one in delta.prompt]
    return scores, [token.id for delta in deltas for token in delta.tokens], reply.usage.cached_tokens


@pytest.mark.parametrize("topology", ["disaggregated", "chunked", "colocated"])
def test_scores_are_the_model_s_and_tokens_those_without(topology: Topology) -> None:
    async def main() -> None:
        async with SimCluster(topology=topology, model=MODEL).running() as cluster:
            prompts = [tuple(range(3, 3 + length)) for length in (1, 2, 65, 700)]
            for prompt in prompts:
                _, expected, _ = await ask(cluster, prompt, replace(SCORED, prompt_logprobs=None))
                scores, output, cached = await ask(cluster, prompt, SCORED)
                assert scores == list(MODEL.score(prompt, range(1, len(prompt)), 2))
                assert output == expected == MODEL.expected_tokens(prompt, SCORED)
                assert cached == 0
                assert await ask(cluster, prompt, replace(SCORED, max_tokens=0)) == (scores, [], 0)

    run_virtual(main(), limit_s=600)


def test_many_at_once_with_preemptions() -> None:
    async def main() -> None:
        cluster = SimCluster(topology="chunked", model=MODEL, num_blocks=40)
        async with cluster.running():
            prompts = [tuple(range(start, start + 100)) for start in range(12)]
            sampling = replace(SCORED, max_tokens=150)
            answers = await asyncio.gather(*(ask(cluster, prompt, sampling) for prompt in prompts))
            for prompt, (scores, output, _) in zip(prompts, answers, strict=True):
                assert scores == list(MODEL.score(prompt, range(1, 100), 2))
                assert output == MODEL.expected_tokens(prompt, sampling)
            assert cluster.workers["decode-0"].host.engine.scheduler.num_preemptions > 0

    run_virtual(main(), limit_s=600)
