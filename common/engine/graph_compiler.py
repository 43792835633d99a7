"""Has a model's graph compiled by a process of its own, and runs it with the loaded model's tensors.

What the graph is, graph.py says; what the process does, compile_graph.py. Knows nothing of plans.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

import orjson
import torch
from torch import Tensor

from common.engine import kernels
from common.engine.graph import graph_path, tensors_of
from common.engine.kernel_step import KernelStep
from common.engine.loading import LoadedModel
from common.engine.scratch import scratch
from common.engine.sealed import is_sound
from common.kv.layout import KVLayout

_TIME_LIMIT_S: Final = 1800
_REMEMBERED_S: Final = 24 * 3600
"""How long a failure keeps the same graph from being tried again."""


class CompileFailed(Exception):
    """A model could not be compiled; the text says why. It can be run all the same, as it is."""


@dataclass(frozen=True, slots=True)
class CompiledModel:
    """Does what LoadedModel.logits does; made for that model's tensors, which it goes on using."""

    run: Callable[[list[Tensor]], Tensor]
    vocab_size: int

    def logits(self, step: KernelStep, wanted: Tensor) -> Tensor:
        """Float32 logits `[len(wanted), vocab]` of the packed token indices `wanted`."""
        padded = torch.nn.functional.pad(wanted, (0, max(0, 2 - len(wanted))))
        paged = step.inputs
        inputs = [step.input_ids, step.position_ids, paged.pool, paged.row_spans, paged.tables, padded]
        return self.run(inputs)[: len(wanted)]


class GraphCompiler:
    """Has one model's graph compiled by a child process, at nice 19, and loads it.

    idle --run--> running --child ended well, or found in the cache--> done
                  running --child failed, stop, or had failed within a day--> failed
    """

    def __init__(self, directory: Path, model: LoadedModel, layout: KVLayout, cache_dir: Path) -> None:
        self._directory = directory
        self._model = model
        self._layout = layout
        self._cache_dir = cache_dir
        self.library = graph_path(directory, layout, cache_dir)
        self._failure = self.library.with_suffix(".failed")
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
        if reason := self._remembered():
            raise CompileFailed(reason)
        try:
            with scratch(self.library.parent) as directory:
                self._run_child(directory)
        except OSError as error:
            raise CompileFailed(str(error)) from error

    def _run_child(self, scratch_directory: Path) -> None:
        command = ["env", f"TMPDIR={scratch_directory}", sys.executable, "-m", "common.engine.compile_graph"]
        command += [str(self._directory), orjson.dumps(self._layout).decode(), str(self._cache_dir)]
        said = scratch_directory / "stderr"
        with said.open("wb") as errors:
            code = self._wait(command, errors)
        if code == 0:
            self._failure.unlink(missing_ok=True)
        elif self._stopped:
            raise CompileFailed("stopped")
        else:
            reason = _error(said.read_text(errors="replace")) or f"exit {code}"
            # Killed by others it may do better the next time.
            raise self._remember(reason) if code > 0 else CompileFailed(reason)

    def _remember(self, reason: str) -> CompileFailed:
        with suppress(OSError):
            self._failure.write_text(reason)
        return CompileFailed(reason)

    def _remembered(self) -> str | None:
        """Why the same compilation failed before, if that is not long ago."""
        try:
            age = time.time() - self._failure.stat().st_mtime
            reason = self._failure.read_text(errors="replace")
        except OSError:
            return None
        if age > _REMEMBERED_S:
            return None
        return f"{reason} ({age / 60:.0f} min ago; tried again after a day, or without {self._failure})"

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
                raise self._remember(f"not done after {_TIME_LIMIT_S} s") from None

    def _load(self) -> CompiledModel:
        try:
            graph = torch.classes.galley.Graph(str(self.library))
            named = tensors_of(self._model.module)
            graph.use({name: named[name] for name in graph.constants()})
        except (RuntimeError, KeyError, OSError) as error:
            raise CompileFailed(f"{self.library}: {error}") from error
        return CompiledModel(graph.run, self._model.shape.vocab_size)


def _error(said: str) -> str:
    """The line of a program's last words that tells the error: C++ adds its stack."""
    lines = [line for line in said.splitlines() if line.strip() and not line.startswith((" ", "frame #"))]
    return lines[-1] if lines else ""


def _kill(child: subprocess.Popen[bytes]) -> None:
    """End a child that leads a process group, with the compilers that it started."""
    if child.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
