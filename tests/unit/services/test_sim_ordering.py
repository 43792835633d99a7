"""What a request says of its urgency travels to where it counts: the queues of prefill and of decode."""

import asyncio
from typing import Literal

import pytest

from common.config import Topology
from common.engine.runner_fake import FakeModel
from common.messages.generation import SLO, SamplingParams
from tests.support.sim_cluster import SimCluster
from tests.support.virtual_loop import run_virtual

MODEL = FakeModel()
ROOM = MODEL.layout.blocks_for(200 + 40) + 1
"""Blocks for one of the requests at a time."""


async def ends(
    cluster: SimCluster, urgencies: list[tuple[int, SLO | None]], lengths: list[int] | None = None
) -> list[int]:
    """One request, and while it runs all the others; their numbers in the order of their ends."""
    order: list[int] = []
    sampling = SamplingParams(max_tokens=40, seed=0, temperature=0.0)

    async def ask(number: int) -> None:
        await asyncio.sleep(0.01 * number)
        priority, slo = urgencies[number]
        prompt = [number] * (lengths[number] if lengths else 200)
        tokens = await cluster.ask(prompt, sampling, priority=priority, slo=slo)
        assert tokens == MODEL.expected_tokens(prompt, sampling)
        order.append(number)

    async with cluster.running():
        await asyncio.gather(*map(ask, range(len(urgencies))))
    return order


@pytest.mark.parametrize("short", ["prefill-0", "decode-0"])
@pytest.mark.parametrize("ordering", ["priority", "fcfs"])
def test_priority_holds_on_both_sides_if_the_operator_says_so(
    short: str, ordering: Literal["priority", "fcfs"]
) -> None:
    cluster = SimCluster(model=MODEL, ordering=ordering)
    cluster.pools = {short: ROOM}
    order = run_virtual(ends(cluster, [(0, None), (2, None), (1, None), (0, None), (-1, None)]))
    assert order == ([0, 4, 3, 2, 1] if ordering == "priority" else [0, 1, 2, 3, 4])


@pytest.mark.parametrize("topology", ["disaggregated", "chunked"])
def test_slack_serves_the_tighter_budget_first(topology: Topology) -> None:
    cluster = SimCluster(topology=topology, model=MODEL, ordering="slack")
    cluster.pools = {"prefill-0" if topology == "disaggregated" else "decode-0": ROOM}
    budgets = [None, SLO(9.0), SLO(8.0), None, SLO(7.0)]
    assert run_virtual(ends(cluster, [(0, slo) for slo in budgets])) == [0, 4, 2, 1, 3]


def test_shortest_first_serves_short_prompts_first() -> None:
    cluster = SimCluster(topology="chunked", model=MODEL, num_blocks=ROOM, ordering="shortest_first")
    assert run_virtual(ends(cluster, [(0, None)] * 4, [200, 190, 150, 170])) == [0, 2, 3, 1]
