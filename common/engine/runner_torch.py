"""The ModelRunner that computes: a transformers model over a paged KV pool, on CPU or CUDA.

As it is ("eager") or, where that can be had, as a compiled graph ("compiled", see graph.py), or on GPUs with
decode steps replayed from CUDA graphs ("cuda_graphs", see cuda_graphs.py).

Knows nothing of scheduling; a plan comes in, KV is written to the pool, sampled tokens come out.
"""

import mmap
import time
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final, Literal

import structlog
import torch
from torch import Tensor

from common import model_files
from common.engine.attention import PagedPool, PagedStep
from common.engine.capacity import CPU_POOL_LIMIT, available_memory, num_blocks_for
from common.engine.cuda_graphs import CudaRecorder, DecodeGraphs, RecordingFailed
from common.engine.grammar import GrammarCompiler
from common.engine.graph_compiler import CompiledModel, CompileFailed, GraphCompiler
from common.engine.interface import Step
from common.engine.kernel_step import KernelStep
from common.engine.kv_codecs import make_codecs
from common.engine.loading import LoadedModel, load_model, pick_device, torch_dtype
from common.engine.matchers import Matchers
from common.engine.paged_decode import find_kernel
from common.engine.runner import BatchPlan, PlanRow, StepResult
from common.engine.sampler import sample, score
from common.engine.scoring import pieces, tokens_of
from common.engine.staging import to_device
from common.errors import ConfigError, InvalidRequest, StepFailed
from common.ids import BlockId, SequenceId
from common.kv.buffer import Buffer
from common.kv.codec import Codecs
from common.kv.layout import KVLayout
from common.messages.generation import SamplingParams
from common.messages.stream import TokenLogprobs

_log = structlog.get_logger()

EngineMode = Literal["eager", "compiled", "cuda_graphs"]
ENGINE_MODES: Final[tuple[EngineMode, ...]] = ("eager", "compiled", "cuda_graphs")

_WARM_UP_ROWS: Final = 8
_SCORED_LOGITS: Final = 1 << 24
"""Logits of prompt tokens in one pass, 64 MiB, where log probabilities of prompts are wanted."""
_MIN_SCORED: Final = 16


class TorchRunner:
    """Executes plans with the model in `directory`; implements ModelRunner.

    `num_blocks` None takes `memory_fraction` of the free memory, but on CPUs no more than 4 GiB, and
    nowhere more than `max_num_seqs` sequences of `max_model_len` tokens could use. On CPUs the pool's pages
    come into being when first written. Not thread-safe: construct it anywhere, then call it in one thread.
    """

    def __init__(
        self,
        directory: Path,
        *,
        dtype: str = "auto",
        device: str = "auto",
        block_size: int = 16,
        num_blocks: int | None = None,
        memory_fraction: float = 0.8,
        max_num_seqs: int = 64,
        max_model_len: int | None = None,
        threads: int | None = None,
        cache_dir: Path = model_files.DEFAULT_CACHE_DIR,
        compile_model: bool = True,
        deterministic: bool = False,
    ) -> None:
        """Load weights, check the architecture, make the pool. Raises UnsupportedModel, ConfigError.

        With `compile_model` a graph in `cache_dir` is used from the first step on; `compile` makes one.
        `deterministic` gives a token's logits the same bits whatever it is computed with: compiled, for which
        it waits here; where that cannot be had, by computing every token alone, which is slow.
        """
        if threads is not None:
            torch.set_num_threads(threads)
        begin = time.monotonic()
        device = pick_device(device)
        self._model = load_model(directory, dtype, device, cache_dir)
        self._max_model_len = _context(directory, max_model_len)
        self._eos = model_files.eos_token_ids(directory)
        self._matchers = Matchers(GrammarCompiler(directory, self._model.shape.vocab_size, self._eos))
        self._weights = f"{model_files.weights_fingerprint(directory)}-{self._model.dtype}"
        self._layout = _layout_of(self._model, block_size)
        if num_blocks is None:
            length = self._max_model_len
            num_blocks = _fitting_blocks(self._layout, device, memory_fraction, max_num_seqs, length)
        self._on_gpu = device != "cpu"
        # One block more for CUDA graphs, whose padding has to write somewhere.
        self._pool = PagedPool(_allocate(self._layout, num_blocks + self._on_gpu, device), self._layout)
        self._buffer = TorchKVBuffer(self._pool.tensor[:num_blocks], self._layout)
        self._codecs = make_codecs(self._pool.tensor[:num_blocks], self._layout)
        self._kernel = find_kernel(self._pool, self._model.shape.heads) if self._on_gpu else None
        self._graphs: DecodeGraphs | None = None
        self._compiled: CompiledModel | None = None
        self._compiler: GraphCompiler | None = None
        if compile_model and self._model.uses_kernels:
            self._compiler = GraphCompiler(directory, self._model, self._layout, cache_dir)
        self._one_by_one = self._begin(deterministic)
        self._graph_rows = max_num_seqs if self._on_gpu and compile_model and not deterministic else 0
        self._say_loaded(directory.name, time.monotonic() - begin)

    def _begin(self, deterministic: bool) -> bool:
        """Compile before the first step where the graph is cached, or all steps must be alike.

        Answers whether only computing every token alone can make them so.
        """
        if self._compiler is not None and (deterministic or self._compiler.is_cached):
            self.compile()
        if not deterministic or self._compiled is not None:
            return False
        self._compiler = None
        _log.warning("deterministic without a compiled model: every token is computed alone")
        return True

    def _say_loaded(self, model: str, seconds: float) -> None:
        num_blocks = self._buffer.num_blocks
        _log.info(
            "model loaded",
            model=model,
            dtype=self._model.dtype,
            mode=self.mode,
            num_blocks=num_blocks,
            pool_mib=num_blocks * self._layout.block_bytes >> 20,
            seconds=round(seconds, 2),
        )

    @property
    def layout(self) -> KVLayout:
        return self._layout

    @property
    def buffer(self) -> "TorchKVBuffer":
        return self._buffer

    @property
    def kv_codecs(self) -> Codecs:
        return self._codecs

    @property
    def max_model_len(self) -> int:
        return self._max_model_len

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self._eos

    @property
    def vocab_size(self) -> int:
        return self._model.shape.vocab_size

    @property
    def weights_fingerprint(self) -> str:
        return self._weights

    @property
    def mode(self) -> EngineMode:
        """How steps are run now; with "cuda_graphs" decode steps, and all others eagerly."""
        if self._graphs is not None:
            return "cuda_graphs"
        return "eager" if self._compiled is None else "compiled"

    def compile(self) -> EngineMode:
        """Have the model compiled, and run all further steps so; returns the mode then. Raises nothing.

        Blocks, for about a minute where the cache has no graph; for any thread. Where compiling is not
        possible or fails, steps go on as before and the log says why.
        """
        if self._compiler is not None and self._compiled is None:
            try:
                self._compiled = self._compiler.run()
                _log.info("the model runs compiled", graph=self._compiler.library.name)
            except CompileFailed as error:
                _log.warning("the model is run without being compiled", reason=str(error))
        return self.mode

    def stop_compiling(self) -> None:
        """Let a `compile` that runs in another thread end soon, and end no other."""
        if self._compiler is not None:
            self._compiler.stop()

    @torch.inference_mode()
    def execute(self, plan: BatchPlan) -> StepResult:
        """One forward pass over all rows, several where prompts are scored; samples. Raises StepFailed."""
        self._matchers.forget(plan.gone)
        result = StepResult(plan.step)
        try:
            for rows in self._passes(plan.rows):
                self._compute(rows, result)
        except (RuntimeError, ValueError, IndexError) as error:
            raise StepFailed(f"step {plan.step}: {error}") from error
        return result

    def _passes(self, rows: Seq[PlanRow]) -> Iterable[Seq[PlanRow]]:
        """The rows of each forward pass."""
        if self._one_by_one:
            return ([token] for row in rows for token in tokens_of(row))
        return pieces(rows, max(_MIN_SCORED, _SCORED_LOGITS // self.vocab_size))

    def _compute(self, rows: Seq[PlanRow], result: StepResult) -> None:
        if self._graphs is not None and self._graphs.takes(rows):
            self._sample(self._graphs.logits(rows), rows, result)
            return
        step: Step
        if self._model.uses_kernels:
            step = KernelStep(self._pool.tensor, self._layout.block_size, rows)
        else:
            step = PagedStep(self._pool, rows, self._kernel)
        packed = [(rows[i], end) for i, end in zip(step.order, step.ends, strict=True)]
        sampled = [(row, end - 1) for row, end in packed if row.sample]
        # A row's position p lies at end - count + p - start of the packed tokens; p - 1 foretells p.
        scored = [(row, end - row.count - row.start - 1) for row, end in packed if row.scored]
        wanted = [last for _, last in sampled]
        wanted += [base + position for row, base in scored for position in row.scored]
        logits = self._logits(step, to_device([wanted], self._pool.device)[0])
        if sampled:
            self._sample(logits[: len(sampled)], [row for row, _ in sampled], result)
        if scored:
            self._score(logits[len(sampled) :], [row for row, _ in scored], result)
        if self._on_gpu and not wanted:
            # Nothing was read, which waits for the step; but its blocks may be others' as soon as it ends.
            torch.cuda.current_stream(self._pool.device).synchronize()

    def _logits(self, step: Step, wanted: Tensor) -> Tensor:
        if self._compiled is not None and isinstance(step, KernelStep):
            return self._compiled.logits(step, wanted)
        return self._model.logits(step, wanted)

    def _sample(self, logits: Tensor, rows: Seq[PlanRow], result: StepResult) -> None:
        """A token for each row, but for those whose grammar cannot go on."""
        masks, failed = self._matchers.masks(rows)  # on a GPU while it still computes the logits
        result.failed.update(failed)
        tokens = sample(logits, rows, self._eos, masks, kernels=self._model.uses_kernels)
        for row, token in zip(rows, tokens, strict=True):
            if row.seq in failed:
                continue
            if not row.sampling.grammar:
                result.tokens[row.seq] = token
                continue
            try:
                ends = self._matchers.advance(row.seq, token.token)
                result.tokens[row.seq] = replace(token, ends=ends)
            except InvalidRequest as error:
                result.failed[row.seq] = error

    def _score(self, logits: Tensor, rows: Seq[PlanRow], result: StepResult) -> None:
        """Log probabilities of the rows' own prompt tokens."""
        counts = [row.sampling.prompt_logprobs or 0 for row in rows]
        tokens = [row.tokens[position] for row in rows for position in row.scored]
        found = iter(score(logits, tokens, max(counts)))
        for row, count in zip(rows, counts, strict=True):
            own = [next(found) for _ in row.scored]
            cut = tuple(TokenLogprobs(one.logprob, one.top[:count]) for one in own)
            result.scored[row.seq] = result.scored.get(row.seq, ()) + cut

    def warm_up(self) -> float:
        """Run a prefill and a small decode batch, so that the first request does not pay for first times.

        Writes to block 0, so call it before anything owns a block. Returns the seconds it took.
        """
        begin = time.monotonic()
        length = min(
            4 * self._layout.block_size, self._layout.block_size * self.buffer.num_blocks, self._max_model_len
        )
        blocks = tuple(BlockId(b) for b in range(self._layout.blocks_for(length)))
        tokens = [0] * length
        sampling = SamplingParams(max_tokens=1, seed=0)

        def row(number: int, start: int, count: int) -> PlanRow:
            return PlanRow(SequenceId(number), tokens, start, count, length, blocks, True, 0, sampling)

        self.execute(BatchPlan(0, (row(0, 0, max(1, length - 1)),)))
        for size in (1, _WARM_UP_ROWS):
            self.execute(BatchPlan(0, tuple(row(i, length - 1, 1) for i in range(size))))
        self._pool.clear(torch.tensor(blocks, device=self._pool.device))
        if self._graph_rows:
            self._record_graphs()
        return time.monotonic() - begin

    def _record_graphs(self) -> None:
        begin = time.monotonic()
        try:
            self._graphs = DecodeGraphs(
                self._model,
                self._pool,
                scratch=self._buffer.num_blocks,
                max_rows=self._graph_rows,
                max_len=self._max_model_len,
                kernel=self._kernel,
                record=CudaRecorder(),
            )
        except RecordingFailed as error:
            _log.warning("decode steps are run eagerly", reason=str(error))
            return
        seconds = round(time.monotonic() - begin, 2)
        _log.info("decode steps recorded as CUDA graphs", sizes=self._graphs.sizes, seconds=seconds)


class TorchKVBuffer:
    """The pool as raw blocks: numpy rows on CPU, uint8 tensors with a CUDA array interface on a GPU."""

    def __init__(self, pool: Tensor, layout: KVLayout) -> None:
        rows = pool.view(torch.uint8).view(len(pool), layout.block_bytes)
        self._rows: Tensor | object = rows.numpy() if pool.device.type == "cpu" else rows
        self._num_blocks = len(pool)
        self._block_bytes = layout.block_bytes

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def block_bytes(self) -> int:
        return self._block_bytes

    def block(self, block: BlockId) -> Buffer:
        """The writable memory of one block: `block_bytes` contiguous bytes, no copy."""
        return self._rows[block]  # type: ignore[index]


def _context(directory: Path, wanted: int | None) -> int:
    """The configured length, if the model allows it. Raises ConfigError."""
    if wanted is None:
        return model_files.max_model_len(directory)
    allowed = model_files.max_model_len(directory)
    if not 2 <= wanted <= allowed:
        raise ConfigError(f"max_model_len: {wanted} is not between 2 and the model's own {allowed}")
    return wanted


def _fitting_blocks(layout: KVLayout, device: str, fraction: float, num_seqs: int, length: int) -> int:
    """How many blocks `fraction` of the free memory holds, as TorchRunner says. Raises ConfigError."""
    on_cpu = device == "cpu"
    return num_blocks_for(
        layout,
        available_memory() if on_cpu else torch.cuda.mem_get_info(device)[0],
        memory_fraction=fraction,
        max_num_seqs=num_seqs,
        max_model_len=length,
        limit=CPU_POOL_LIMIT if on_cpu else 1 << 62,
    )


def _layout_of(model: LoadedModel, block_size: int) -> KVLayout:
    shape = model.shape
    return KVLayout(shape.kv_heads, shape.num_layers, block_size, shape.head_dim, model.dtype)


def _allocate(layout: KVLayout, num_blocks: int, device: str) -> Tensor:
    """The zeroed pool tensor. On CPUs from anonymous memory, which is zero without being touched.

    Raises ConfigError when there is not so much memory.
    """
    shape, dtype = layout.pool_shape(num_blocks), torch_dtype(layout.dtype)
    size = num_blocks * layout.block_bytes
    try:
        if device != "cpu":
            return torch.zeros(shape, dtype=dtype, device=device)
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # a kernel without them does not know the word
            memory.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(memory, dtype=dtype).view(shape)
    except (OSError, OverflowError, torch.OutOfMemoryError) as error:
        raise ConfigError(f"num_blocks: {num_blocks} of them take {size >> 20} MiB: {error}") from error
