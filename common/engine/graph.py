"""A model as one compiled graph: exported from transformers' code, compiled by Inductor to a small library.

One graph serves every step: the numbers of tokens, rows and blocks are dynamic, products and attention are
our own operators (kernels.py). The library holds no weights; it is made in a process of its own
(compile_graph.py), kept in the cache directory, and given the loaded model's tensors. Knows nothing of plans.
"""

import hashlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import IO, Final, cast

import orjson
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from common.engine import kernels
from common.engine.kernel_step import KernelStep, PagedInputs
from common.engine.loading import PAGED, LoadedModel, checked_config, register_attention, torch_dtype
from common.engine.products import use_kernels
from common.engine.sealed import is_sound, publish
from common.kv.layout import DType, KVLayout

_MADE_OF: Final = ("graph.py", "kernel_step.py", "loading.py", "products.py")
_TIME_LIMIT_S: Final = 1800
_MOST: Final = 1 << 20
_INDUCTOR: Final[dict[str, bool | int]] = {
    "aot_inductor.package_constants_in_so": False,
    "compile_threads": 1,
    # Small buffers would become literals otherwise, with what the skeleton holds by chance.
    "always_keep_tensor_constants": True,
    "joint_graph_constant_folding": False,
}


class CompileFailed(Exception):
    """A model could not be compiled; the text says why. It can be run all the same, as it is."""


@dataclass(frozen=True, slots=True)
class CompiledModel:
    """Does what LoadedModel.logits does; made for that model's tensors, which it goes on using."""

    run: Callable[[list[Tensor]], Tensor]
    vocab_size: int

    def logits(self, step: KernelStep, wanted: Tensor) -> Tensor:
        """Float32 logits `[len(wanted), vocab]` of the packed token indices `wanted`."""
        asked = torch.nn.functional.pad(wanted, (0, max(0, 2 - len(wanted))))
        paged = step.inputs
        inputs = [step.input_ids, step.position_ids, paged.pool, paged.rows, paged.tables, asked]
        return self.run(inputs)[: len(wanted)]


class GraphCompiler:
    """Has one model's graph compiled by a child process, at nice 19, and loads it.

    idle --run--> running --child ended well, or found in the cache--> done
                  running --child failed, stop--> failed
    """

    def __init__(self, directory: Path, model: LoadedModel, layout: KVLayout, cache_dir: Path) -> None:
        self._directory = directory
        self._model = model
        self._layout = layout
        self._cache_dir = cache_dir
        self.library = graph_path(directory, layout, cache_dir)
        self._child: subprocess.Popen[bytes] | None = None
        self._stopped = False

    @property
    def is_cached(self) -> bool:
        return is_sound(self.library)

    def run(self) -> CompiledModel:
        """Blocks until the graph is there (about a minute the first time). Raises CompileFailed."""
        if not self.is_cached:
            self._compile()
        return self._load()

    def stop(self) -> None:
        """End the child, if there is one; from any thread. `run` then raises CompileFailed."""
        self._stopped = True
        if self._child is not None:
            _kill(self._child)

    def _compile(self) -> None:
        if kernels.compiler() is None:
            raise CompileFailed("there is no C++ compiler: install g++")
        with tempfile.TemporaryDirectory(prefix="galley-", ignore_cleanup_errors=True) as scratch:
            command = ["env", f"TMPDIR={scratch}", sys.executable, "-m", "common.engine.compile_graph"]
            command += [str(self._directory), orjson.dumps(self._layout).decode(), str(self._cache_dir)]
            said = Path(scratch) / "stderr"
            with said.open("wb") as errors:
                code = self._wait(command, errors)
            if code:
                reason = _error(said.read_text(errors="replace")) or f"exit {code}"
                raise CompileFailed("stopped" if self._stopped else reason)

    def _wait(self, command: list[str], errors: IO[bytes]) -> int:
        """Run the child to its end. Its standard input ends with this process, and it ends with that."""
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=errors, stderr=errors, process_group=0) as child:
            self._child = child
            if self._stopped:
                _kill(child)
            try:
                return child.wait(_TIME_LIMIT_S)
            except subprocess.TimeoutExpired:
                _kill(child)
                raise CompileFailed(f"not done after {_TIME_LIMIT_S} s") from None

    def _load(self) -> CompiledModel:
        try:
            graph = torch.classes.galley.Graph(str(self.library))
            named = _tensors(_Traced(self._model.module))
            graph.use({name: named[name] for name in graph.constants()})
        except (RuntimeError, KeyError, OSError) as error:
            raise CompileFailed(f"{self.library}: {error}") from error
        return CompiledModel(graph.run, self._model.vocab_size)


def _error(said: str) -> str:
    """The line of a program's last words that tells the error: C++ adds its stack."""
    lines = [line for line in said.splitlines() if line.strip() and not line.startswith((" ", "frame #"))]
    return lines[-1] if lines else ""


def _kill(child: subprocess.Popen[bytes]) -> None:
    """End a child that leads a process group, with the compilers that it started."""
    if child.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)


def graph_path(directory: Path, layout: KVLayout, cache_dir: Path) -> Path:
    """Where the compiled graph of a model lies: a name made of all that it depends on."""
    digest = hashlib.blake2b((directory / "config.json").read_bytes(), digest_size=16)
    for name in _MADE_OF:
        digest.update((Path(__file__).parent / name).read_bytes())
    parts = (layout, kernels.sources_digest(), version("transformers"))
    digest.update(repr((parts, sorted(kernels.cpu_features()))).encode())
    return cache_dir.expanduser() / "graphs" / f"{digest.hexdigest()}.pt2"


def compile_graph(directory: Path, layout: KVLayout, target: Path) -> None:
    """Export and compile the model of `directory` to the file `target`, without its weights.

    For a process of its own: takes all its time in Python and the C++ compiler. Raises whatever torch raises.
    """
    module = _skeleton(directory, layout.dtype)
    pool = torch.zeros(layout.pool_shape(2), dtype=torch_dtype(layout.dtype))
    ids, rows = torch.zeros(1, 8, dtype=torch.long), torch.zeros(4, 3, dtype=torch.int32)
    tables, wanted = torch.zeros(4, 4, dtype=torch.int32), torch.zeros(4, dtype=torch.long)
    tokens, high, width, asked, blocks = (
        torch.export.Dim(name, min=2, max=_MOST) for name in ("tokens", "rows", "width", "asked", "blocks")
    )
    shapes = ({1: tokens}, {1: tokens}, {0: blocks}, {0: high}, {0: high, 1: width}, {0: asked})
    with torch.no_grad():
        program = torch.export.export(
            _Traced(module),
            (ids, ids.clone(), pool, rows, tables, wanted),
            dynamic_shapes=shapes,
            strict=False,
        )
        scratch = target.with_suffix(f".{os.getpid()}.pt2")
        try:
            torch._inductor.aoti_compile_and_package(
                program,
                package_path=str(scratch),
                inductor_configs=_INDUCTOR,
            )
            publish(scratch, target)
        finally:
            scratch.unlink(missing_ok=True)


class _Traced(nn.Module):
    """What is exported: tensors in, float32 logits `[wanted, vocab]` out."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, ids: Tensor, positions: Tensor, pool: Tensor, rows: Tensor, tables: Tensor, wanted: Tensor
    ) -> Tensor:
        output = self.model(
            input_ids=ids,
            position_ids=positions,
            use_cache=False,
            galley_step=PagedInputs(pool, rows, tables),
            logits_to_keep=wanted,
        )
        return cast(Tensor, output.logits)[0].float()


def _skeleton(directory: Path, dtype: DType) -> nn.Module:
    """The model with its shapes and no weights: memory that is never written costs nothing."""
    register_attention()
    config, _ = checked_config(directory)
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config, dtype=torch_dtype(dtype), attn_implementation=PAGED)
    module.eval().requires_grad_(False)
    use_kernels(module)
    return cast(nn.Module, module.to_empty(device="cpu"))


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
