"""One step as our kernels want it: packed tokens, rows and block tables, four small tensors in all.

Knows nothing of models and of who owns a block.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate
from typing import cast

import numpy as np
import torch
from torch import Tensor

from common.engine.interface import AttentionKind
from common.engine.runner import PlanRow


@dataclass(frozen=True, slots=True)
class PagedInputs:
    """What torch.ops.galley.attend needs to know of a step.

    `pool` bfloat16 `[blocks, kv_heads, layers, 2, block_size, head_dim]`, `row_spans` int32
    `[rows, 3]` (first packed token, how many, position of the first), `tables` int32 `[rows, blocks]`.
    """

    pool: Tensor
    row_spans: Tensor
    tables: Tensor

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, kind: AttentionKind) -> Tensor:
        """Write the new keys and values, then attend.

        `query` is `[heads, tokens, head_dim]`, `key` and `value` `[kv_heads, tokens, head_dim]`; the answer
        is `[tokens, heads, head_dim]`.
        """
        window, softcap = kind.window or 0, kind.softcap or 0.0
        out = torch.ops.galley.attend(
            query, key, value, self.pool, self.row_spans, self.tables, layer, kind.scaling, window, softcap
        )
        return cast(Tensor, out)


class KernelStep:
    """A step's tensors, rows in the plan's order.

    No axis is shorter than 2: a compiled graph would take a 1 for a constant. What is added belongs to no
    row, and nobody reads it.
    """

    def __init__(self, pool: Tensor, block_size: int, rows: Seq[PlanRow]) -> None:
        self.order = list(range(len(rows)))
        self.ends = list(accumulate(row.count for row in rows))
        total, num_rows = max(2, self.ends[-1]), max(2, len(rows))
        widths = [-(-(row.start + row.count) // block_size) for row in rows]
        ids = np.zeros((1, total), np.int64)
        positions = np.zeros((1, total), np.int64)
        row_spans = np.zeros((num_rows, 3), np.int32)
        tables = np.zeros((num_rows, max(2, *widths)), np.int32)
        for index, (row, end, width) in enumerate(zip(rows, self.ends, widths, strict=True)):
            first, stop = end - row.count, row.start + row.count
            ids[0, first:end] = row.tokens[row.start : stop]
            positions[0, first:end] = np.arange(row.start, stop)
            row_spans[index] = first, row.count, row.start
            tables[index, :width] = row.blocks[:width]
        self.input_ids = torch.from_numpy(ids)
        self.position_ids = torch.from_numpy(positions)
        self.inputs = PagedInputs(pool, torch.from_numpy(row_spans), torch.from_numpy(tables))

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, kind: AttentionKind) -> Tensor:
        """See PagedInputs.attend."""
        return self.inputs.attend(layer, query, key, value, kind)
