"""The kernel galley_paged_decode and its fallback on a GPU, against arithmetic written down plainly."""

from itertools import product
from typing import Any

import pytest
import torch

from common.engine.interface import AttentionKind
from common.engine.paged_decode import GatheredDecode, find_kernel
from common.kv.layout import KVLayout
from tests.support.paged_reference import attend_plainly, random_case

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

GPU = torch.device("cuda")
TOLERANCES = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 5e-3}


@pytest.mark.parametrize(
    ("head_dim", "heads", "window", "softcap", "dtype"),
    [
        *product([64, 128], [(4, 4), (6, 3), (16, 2)], [None, 40], [None, 5.0], ["float32", "bfloat16"]),
        *product([16, 80, 256], [(6, 3)], [None, 40], [None], ["float32", "bfloat16", "float16"]),
    ],
)
def test_kernel_and_fallback_are_right(
    head_dim: int, heads: tuple[int, int], window: int | None, softcap: float | None, dtype: Any
) -> None:
    case = random_case(KVLayout(heads[1], 2, 16, head_dim, dtype), heads[0], GPU)
    kernel = find_kernel(case.pool, heads[0])
    assert kernel is not None
    kind = AttentionKind(head_dim**-0.5, window, softcap)
    expected = attend_plainly(case, 1, kind)
    for make in (kernel, GatheredDecode):
        found = make(case.pool, case.tables, case.lengths).attend(1, case.query, kind).float().cpu()
        torch.testing.assert_close(found, expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])
