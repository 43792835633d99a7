"""A plan as the four small tensors that our kernels want."""

import pytest
import torch
from torch import Tensor

from common.engine.interface import AttentionKind
from common.engine.kernel_step import KernelStep
from common.engine.runner import PlanRow
from common.ids import BlockId, SequenceId
from common.messages.generation import SamplingParams

POOL = torch.zeros(9, 1, 1, 2, 4, 32, dtype=torch.bfloat16)


def row(start: int, count: int, *blocks: int) -> PlanRow:
    """Tokens are 100, 101, ...: one more than is computed are known."""
    return PlanRow(
        seq=SequenceId(1),
        tokens=list(range(100, 100 + start + count + 1)),
        start=start,
        count=count,
        num_prompt=start + count,
        blocks=tuple(map(BlockId, blocks)),
        sample=True,
        choice=0,
        sampling=SamplingParams(max_tokens=1, seed=0),
    )


def listed(*tensors: Tensor) -> list[list[list[int]]]:
    return [tensor.tolist() for tensor in tensors]


def test_rows_are_packed_in_the_plans_order() -> None:
    step = KernelStep(POOL, 4, [row(0, 3, 7), row(9, 1, 3, 1, 2), row(2, 4, 5, 6, 8)])
    assert step.order == [0, 1, 2]
    assert step.ends == [3, 4, 8]
    assert listed(step.input_ids, step.position_ids) == [
        [[100, 101, 102, 109, 102, 103, 104, 105]],
        [[0, 1, 2, 9, 2, 3, 4, 5]],
    ]
    # The last row has a block that this step does not reach.
    assert listed(step.inputs.row_spans, step.inputs.tables) == [
        [[0, 3, 0], [3, 1, 9], [4, 4, 2]],
        [[7, 0, 0], [3, 1, 2], [5, 6, 0]],
    ]
    assert step.inputs.row_spans.dtype == step.inputs.tables.dtype == torch.int32
    assert step.inputs.pool is POOL


def test_a_token_alone_is_padded_by_one_of_no_row() -> None:
    step = KernelStep(POOL, 4, [row(1, 1, 7)])
    assert step.ends == [1]
    assert listed(step.input_ids, step.position_ids) == [[[101, 0]], [[1, 0]]]
    assert listed(step.inputs.row_spans, step.inputs.tables) == [[[0, 1, 1], [0, 0, 0]], [[7, 0], [0, 0]]]


@pytest.mark.kernels
@pytest.mark.usefixtures("operators")
def test_a_layers_window_cap_and_scaling_reach_the_operator() -> None:
    """Queries of ones, keys of 0, 1, 0: scores are 0, 1, 0 before the cap, values tell who is seen."""
    ones = torch.ones(1, 3, 32, dtype=torch.bfloat16)
    key, value = torch.zeros_like(ones), torch.zeros_like(ones)
    key[:, 1], value[:, 0], value[:, 1] = 1, 1, 2

    def last(kind: AttentionKind) -> float:
        step = KernelStep(POOL.clone(), 4, [row(0, 3, 7)])
        return float(step.attend(0, ones, key, value, kind)[2, 0, 0])

    e = torch.tensor(1.0).exp().item()
    capped = (0.5 * torch.tensor(2.0).tanh()).exp().item()
    assert last(AttentionKind(1 / 32)) == pytest.approx((1 + 2 * e) / (2 + e), rel=0.01)
    assert last(AttentionKind(1 / 32, window=2)) == pytest.approx(2 * e / (1 + e), rel=0.01)
    assert last(AttentionKind(1 / 32, softcap=0.5)) == pytest.approx(
        (1 + 2 * capped) / (2 + capped), rel=0.01
    )
    assert last(AttentionKind(1 / 32, window=1)) == 0
