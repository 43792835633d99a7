"""The model that repeats its prompt, and its pace."""

import asyncio
from dataclasses import replace

from bench.fake.echo import EchoRunner, Pace
from common.engine.runner import BatchPlan, PlanRow
from common.ids import SequenceId
from common.messages.generation import SamplingParams
from tests.support.virtual_loop import run_virtual

ROW = PlanRow(
    seq=SequenceId(1),
    tokens=[7, 8, 9],
    start=0,
    count=3,
    num_prompt=3,
    blocks=(),
    sample=True,
    choice=0,
    sampling=SamplingParams(max_tokens=9, seed=0),
)


def test_the_output_is_the_prompt_again_and_again() -> None:
    runner, tokens = EchoRunner(8192, 16), [7, 8, 9]
    for step in range(1, 8):
        row = replace(ROW, tokens=tokens, start=len(tokens) - 1, count=1)
        tokens.append(runner.execute(BatchPlan(step, (row,))).tokens[SequenceId(1)].token)
    assert tokens == [7, 8, 9] * 3 + [7]


def test_a_row_that_is_not_sampled_yields_nothing() -> None:
    assert EchoRunner(8192, 16).execute(BatchPlan(1, (replace(ROW, sample=False),))).tokens == {}


def test_steps_end_on_a_grid_of_their_own_phase_whatever_the_loop_does_between() -> None:
    async def ends(phase: float) -> list[float]:
        loop = asyncio.get_running_loop()
        pace, found = Pace(EchoRunner(8192, 16), 0.1, phase), []
        await asyncio.sleep(3.03)
        for busy in (0.0, 0.04, 0.09, 0.0):
            await pace.execute(BatchPlan(1, (ROW,)))
            found.append(round(loop.time() % 0.1, 6) % 0.1)
            await asyncio.sleep(busy)
        return found

    assert run_virtual(ends(0.25)) == [0.025] * 4
    assert run_virtual(ends(0.75)) == [0.075] * 4
