"""The whole run of one process: load both engines, take the ceilings around every cell, time the cells.

Knows nothing of the command line and of how figures are shown.
"""

import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from bench.engine.ceilings import CeilingProbe
from bench.engine.cells import Cell, Measured, Prefill
from bench.engine.contender import Effort, compare
from bench.engine.ours import OurEngine, blocks_needed
from bench.engine.plain import PlainTransformers
from common.engine.runner_torch import TorchRunner
from common.runtime.service import settle

BLOCK_SIZE = 16


class Pair:
    """Our engine and plain transformers on `cores`, in this process, which is pinned for good."""

    def __init__(
        self, directory: Path, cores: Sequence[int], extents: Sequence[tuple[int, int]], *, eager: bool
    ) -> None:
        """`extents` are the batches to come, as (sequences, tokens of each).

        Unless `eager`, our model is compiled first, which takes a minute where no cache has it.
        """
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(len(cores))
        runner = TorchRunner(
            directory,
            dtype="bfloat16",
            device="cpu",
            block_size=BLOCK_SIZE,
            num_blocks=blocks_needed(BLOCK_SIZE, extents),
            threads=len(cores),
            compile_model=not eager,
        )
        self.mode = runner.compile()
        runner.warm_up()
        self.plain = PlainTransformers(directory)
        self.ours = OurEngine(runner)
        settle()  # as a worker does: collections that look through torch are no part of a step


class Trial:
    """Both engines, and the machine's ceilings around every cell."""

    def __init__(self, directory: Path, cores: Sequence[int], cells: Sequence[Cell], *, eager: bool) -> None:
        self._cells = cells
        self._pair = Pair(directory, cores, [_extent(cell) for cell in cells], eager=eager)
        self._probe = CeilingProbe(len(cores))

    @property
    def mode(self) -> str:
        return self._pair.mode

    def run(self, effort: Effort) -> Iterator[Measured]:
        """Every cell in turn."""
        rng = random.Random(0)
        shape = self._pair.plain.shape
        for cell in self._cells:
            tokens = [rng.randrange(shape.vocab) for _ in range(_extent(cell)[1])]
            before = self._probe.measure()
            ours, plain = compare(cell, (self._pair.ours, self._pair.plain), tokens, effort)
            yield Measured(cell, ours, plain, before.better(self._probe.measure()), shape)


def _extent(cell: Cell) -> tuple[int, int]:
    """(sequences, tokens of each)."""
    return (1, cell.tokens) if isinstance(cell, Prefill) else (cell.batch, cell.context)
