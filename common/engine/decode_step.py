"""A step of decode rows alone, in shapes that depend on a bucket's size only, at addresses that never change.

A plan's rows are padded to the bucket with rows that write to a scratch block, which nobody owns, and whose
output nobody reads. Knows nothing of CUDA and of who owns a block.
"""

from collections.abc import Sequence as Seq
from typing import Final

import torch
from torch import Tensor

from common.engine.attention import MakeDecode, PagedPool
from common.engine.interface import AttentionKind
from common.engine.runner import PlanRow
from common.engine.staging import staging

_IDS, _POSITIONS, _BLOCKS, _OFFSETS, _LENGTHS, _BEGUN, _TABLES = range(7)


class DecodeInputs:
    """A bucket's numbers on the device, int64 `[6 + width, rows]`: a column is a row of the batch.

    One matrix, so that one copy brings it all; the block tables last, so that only what is used of their
    width is copied. What lies behind stays as it was: numbers of blocks all the same.
    """

    def __init__(self, memory: Tensor, rows: int, block_size: int, scratch: int) -> None:
        """On `memory`, a flat int64 tensor that other buckets may use too, at other times."""
        self.size: Final = rows
        self.numbers: Final = memory[: len(memory) // rows * rows].view(-1, rows)
        self._block_size = block_size
        self._scratch = scratch

    @staticmethod
    def size_of(rows: int, width: int) -> int:
        """How long `memory` has to be."""
        return (_TABLES + width) * rows

    def fill(self, rows: Seq[PlanRow]) -> Tensor:
        """Write the numbers of at most `size` rows, without waiting; gives the blocks that they begin."""
        size = self._block_size
        widths = [row.start // size + 1 for row in rows]
        host = staging(_TABLES + max(widths, default=1), self.size, device=self.numbers.device)
        matrix = host.numpy()
        matrix[:_TABLES] = 0
        matrix[_LENGTHS] = 1
        matrix[_BLOCKS] = matrix[_TABLES:] = self._scratch
        for column, (row, width) in enumerate(zip(rows, widths, strict=True)):
            at = row.start
            matrix[:_BEGUN, column] = row.tokens[at], at, row.blocks[width - 1], at % size, at + 1
            matrix[_TABLES : _TABLES + width, column] = row.blocks[:width]
        begun = matrix[_BLOCKS, : len(rows)][matrix[_OFFSETS, : len(rows)] == 0]
        matrix[_BEGUN, : len(begun)] = begun
        self.numbers[: len(matrix)].copy_(host, non_blocking=True)
        return self.numbers[_BEGUN, : len(begun)]


class DecodeStep:
    """One forward pass over a DecodeInputs; see interface.Step. Made anew for each, as for a recording."""

    def __init__(self, pool: PagedPool, inputs: DecodeInputs, make: MakeDecode) -> None:
        numbers = inputs.numbers
        self._pool = pool
        self.order = list(range(inputs.size))
        self.ends = list(range(1, inputs.size + 1))
        self.input_ids = numbers[_IDS][None]
        self.position_ids = numbers[_POSITIONS][None]
        self._blocks, self._offsets = numbers[_BLOCKS], numbers[_OFFSETS]
        self._decode = make(pool, numbers[_TABLES:].T, numbers[_LENGTHS])

    @property
    def wanted(self) -> Tensor:
        """Every row's one token."""
        return torch.arange(len(self.order), device=self._pool.device)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, kind: AttentionKind) -> Tensor:
        """See attention.PagedStep.attend."""
        self._pool.write(layer, self._blocks, self._offsets, key.transpose(0, 1), value.transpose(0, 1))
        return self._decode.attend(layer, query.transpose(0, 1), kind)
