"""A whole cluster in virtual time: right tokens in every topology, and nothing left behind."""

from typing import get_args

import pytest

from common.config import Topology
from common.engine.runner_fake import FakeModel
from common.messages.generation import SamplingParams
from tests.support.sim_cluster import SimCluster
from tests.support.virtual_loop import run_virtual

MODEL = FakeModel()
SAMPLING = SamplingParams(max_tokens=12, seed=5)
LENGTHS = [1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 255, 256, 257, 300, 600]
PROMPTS = [[(7 * n + i) % MODEL.vocab_size for i in range(n)] for n in LENGTHS]


@pytest.mark.parametrize("topology", get_args(Topology))
def test_every_topology_gives_the_models_tokens(topology: Topology) -> None:
    async def main() -> None:
        async with SimCluster(prefill=2, decode=2, topology=topology).running() as cluster:
            answers = await cluster.ask_all(PROMPTS, SAMPLING)
            assert answers == [MODEL.expected_tokens(prompt, SAMPLING) for prompt in PROMPTS]

    run_virtual(main())
