"""That what kernels.py says of our operators is what the library does: both sides state these numbers."""

import pytest
import torch

from common.engine.kernels import HEAD_DIMS, MOST_GROUP, PANEL

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("operators")]


def attends(head_dim: int, group: int) -> bool:
    """Whether `group` query heads of that size can share a KV head."""
    query, key = (torch.zeros(heads, 1, head_dim).bfloat16() for heads in (group, 1))
    pool = torch.zeros(1, 1, 1, 2, 16, head_dim).bfloat16()
    rows, tables = torch.tensor([[0, 1, 0]], dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
    try:
        torch.ops.galley.attend(query, key, key, pool, rows, tables, 0, 1.0, 0, 0.0)
    except RuntimeError as error:
        assert "head_dim" in str(error) or "share keys" in str(error)  # noqa: PT017
        return False
    return True


def test_the_sizes_of_heads() -> None:
    assert tuple(size for size in range(8, 513, 8) if attends(size, 1)) == HEAD_DIMS


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_how_many_heads_share_keys(head_dim: int) -> None:
    assert [group for group in range(1, 40) if attends(head_dim, group)] == [*range(1, MOST_GROUP + 1)]


def test_the_outputs_of_a_panel() -> None:
    for outputs, panels in ((1, 1), (PANEL, 1), (PANEL + 1, 2)):
        assert torch.ops.galley.pack(torch.zeros(outputs, 4).bfloat16()).shape == (panels, 2, PANEL, 2)
