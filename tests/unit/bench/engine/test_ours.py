"""The plans that our engine gets in the bench are those of a real service."""

import pytest

from bench.engine.ours import OurEngine, blocks_needed
from common.engine.runner import BatchPlan, StepResult
from common.engine.runner_fake import FakeModel, FakeRunner
from common.ids import BlockId
from common.kv.layout import KVLayout
from common.messages.stream import TokenLogprobs


class Watched(FakeRunner):
    """Keeps the plans it executes."""

    def __init__(self, model: FakeModel, num_blocks: int) -> None:
        super().__init__(model, num_blocks)
        self.plans: list[BatchPlan] = []

    def execute(self, plan: BatchPlan) -> StepResult:
        result = super().execute(plan)
        self.plans.append(plan)
        return result


LAYOUT = KVLayout(kv_heads=1, num_layers=1, block_size=16, head_dim=8, dtype="bfloat16")


@pytest.fixture
def runner() -> Watched:
    return Watched(FakeModel(layout=LAYOUT), 64)


def test_every_step_adds_one_sampled_token_to_each_sequence(runner: Watched) -> None:
    ours = OurEngine(runner)
    ours.fill(3, 32)
    ours.step()
    first = [list(row.tokens) for row in runner.plans[0].rows]
    ours.step()
    one, two = runner.plans
    assert [(row.start, row.count, row.num_prompt) for row in one.rows] == [(31, 1, 32)] * 3
    assert [(row.start, row.count, row.num_prompt) for row in two.rows] == [(32, 1, 32)] * 3
    assert [list(row.tokens)[:33] for row in two.rows] == first
    assert two.step == one.step + 1


def test_no_two_sequences_share_a_block(runner: Watched) -> None:
    ours = OurEngine(runner)
    ours.fill(4, 100)
    ours.step()
    blocks = [block for row in runner.plans[0].rows for block in row.blocks]
    assert len(set(blocks)) == len(blocks)
    assert len(runner.plans[0].rows[0].blocks) * 16 >= 100 + 16


def test_rewinding_repeats_the_same_step(runner: Watched) -> None:
    ours = OurEngine(runner)
    ours.fill(2, 48)
    ours.step()
    ours.rewind()
    ours.step()
    assert [row.start for plan in runner.plans for row in plan.rows] == [47] * 4


def test_a_prompt_is_one_row_from_its_first_token_and_ended_ones_are_told(runner: Watched) -> None:
    ours = OurEngine(runner)
    ours.prefill(range(40))
    ours.prefill(range(40))
    first, second = runner.plans
    assert (first.rows[0].start, first.rows[0].count, first.rows[0].sample) == (0, 40, True)
    assert second.gone == (first.rows[0].seq,)


def test_the_pool_holds_numbers_that_are_random_and_finite(runner: Watched) -> None:
    OurEngine(runner)
    pool = b"".join(bytes(runner.buffer.block(BlockId(number))) for number in range(64))
    exponents = {byte & 0x7F for byte in pool[1::2]}
    assert len(exponents) > 2
    assert max(exponents) < 0x7F


def test_the_pool_is_as_large_as_the_largest_batch() -> None:
    assert blocks_needed(16, [(1, 2048), (32, 256)]) == 32 * (16 + 2)


def test_scoring_a_text_asks_for_every_token_but_the_first_and_samples_none() -> None:
    plans: list[BatchPlan] = []

    class Scoring(Watched):
        def execute(self, plan: BatchPlan) -> StepResult:
            plans.append(plan)
            (row,) = plan.rows
            scored = tuple(TokenLogprobs(-float(position), ()) for position in row.scored)
            return StepResult(plan.step, scored={row.seq: scored})

    ours = OurEngine(Scoring(FakeModel(layout=LAYOUT), 64))
    assert ours.logprobs(range(5)) == [-1, -2, -3, -4]
    assert not plans[0].rows[0].sample
