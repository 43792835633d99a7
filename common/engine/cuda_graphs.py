"""Decode steps as CUDA graphs: one recorded for each size of batch, then replayed with other numbers.

A decode step of a small model is hundreds of launches of a few microseconds each, which Python cannot keep up
with; a replay is one. Knows nothing of scheduling; what is no decode step is for others to run.
"""

from bisect import bisect_left
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Final

import torch
from torch import Tensor

from common.engine.attention import MakeDecode, PagedPool
from common.engine.decode_step import DecodeInputs, DecodeStep
from common.engine.loading import LoadedModel
from common.engine.paged_decode import GatheredDecode
from common.engine.runner import PlanRow

_GATHER_LIMIT: Final = 1 << 30
"""Bytes that the fallback may gather in a layer: more is better done eagerly, at the width of the day."""

Compute = Callable[[], Tensor]


class RecordingFailed(Exception):
    """The model's forward pass cannot be a CUDA graph; the text says why. It can be run eagerly."""


class CudaRecorder:
    """Turns a computation into a CUDA graph that does it again at the same addresses.

    All graphs share one memory pool, so what one gave is valid until any is replayed.
    """

    def __init__(self) -> None:
        self._memory = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Compute) -> Compute:
        """Run `compute` twice and return its replay. Raises RecordingFailed."""
        try:
            self._beforehand(compute)
            graph = torch.cuda.CUDAGraph()
            # Other threads may go on with CUDA: UCX has some of its own.
            with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
                output = compute()
        except RuntimeError as error:
            raise RecordingFailed(str(error).strip().split("\n")[0]) from error

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay

    def _beforehand(self, compute: Compute) -> None:
        """On a stream of its own, as torch asks for: workspaces and kernels come into being now."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            compute()
        torch.cuda.current_stream().wait_stream(stream)


class DecodeGraphs:
    """The recorded decode steps of one model over one pool, whose block `scratch` nobody else uses.

    For plans of up to `max_rows` rows, each of one token at a position below `max_len`.
    """

    def __init__(
        self,
        model: LoadedModel,
        pool: PagedPool,
        *,
        scratch: int,
        max_rows: int,
        max_len: int,
        kernel: MakeDecode | None,
        record: Callable[[Compute], Compute],
    ) -> None:
        """Record all sizes, the largest first, so that the others fit into its memory.

        Takes about two forward passes each, writes to `scratch` only. Raises RecordingFailed.
        """
        self._model = model
        self._pool = pool
        self._make = kernel or GatheredDecode
        width = min(pool.layout.blocks_for(max_len), len(pool.tensor))
        sizes = bucket_sizes(max_rows)
        if kernel is None:
            one = GatheredDecode.workspace_bytes(pool.layout, 1, width)
            sizes = [n for n in sizes if n * one <= _GATHER_LIMIT]
        if not sizes:
            raise RecordingFailed(f"there is no kernel, and gathering {width} blocks takes too much memory")
        self._sizes = sizes
        memory = torch.full((DecodeInputs.size_of(sizes[-1], width),), scratch, device=pool.device)
        self._inputs = {
            n: DecodeInputs(memory[: DecodeInputs.size_of(n, width)], n, pool.layout.block_size, scratch)
            for n in sizes
        }
        self._replays = {n: self._record(self._inputs[n], record) for n in reversed(sizes)}

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self._sizes)

    def takes(self, rows: Seq[PlanRow]) -> bool:
        """Whether these rows are a decode step that was recorded."""
        return len(rows) <= self._sizes[-1] and all(
            row.count == 1 and row.sample and not row.scored for row in rows
        )

    @torch.inference_mode()
    def logits(self, rows: Seq[PlanRow]) -> Tensor:
        """Float32 logits `[len(rows), vocab]`, in the order of the rows, valid until the next call."""
        size = self._sizes[bisect_left(self._sizes, len(rows))]
        with torch.cuda.device_of(self._pool.tensor):  # type: ignore[no-untyped-call]
            begun = self._inputs[size].fill(rows)
            if len(begun):
                self._pool.clear(begun)  # for those who gather whole blocks: see PagedStep
            return self._replays[size]()[: len(rows)]

    @torch.inference_mode()
    def _record(self, inputs: DecodeInputs, record: Callable[[Compute], Compute]) -> Compute:
        def compute() -> Tensor:
            step = DecodeStep(self._pool, inputs, self._make)
            return self._model.logits(step, step.wanted)

        inputs.fill([])
        with torch.cuda.device_of(self._pool.tensor):  # type: ignore[no-untyped-call]
            return record(compute)


def bucket_sizes(max_rows: int) -> list[int]:
    """1, 2, 4, 8 and multiples of 8, and `max_rows` itself: at most 7 rows of padding where rows are many."""
    return [n for n in (1, 2, 4, *range(8, max_rows, 8)) if n < max_rows] + [max_rows]
