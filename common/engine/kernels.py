"""Our own CPU operators, torch.ops.galley.*: built once with the machine's C++ compiler, then loaded.

Packed products and paged attention in bfloat16, and the drawing of tokens, for CPUs with AVX-512 BF16 (csrc/
has the why and how). The library lies in the cache directory under a name made of all that went into it.
Knows nothing of models.
"""

import hashlib
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Final

import structlog
import torch

from common.engine.scratch import scratch
from common.engine.sealed import is_sound, locked, publish

HEAD_DIMS: Final = (32, 64, 96, 128, 256)
MOST_GROUP: Final = 16
"""Query heads that may share a KV head."""
PANEL: Final = 32
"""Outputs of a product that a packed weight keeps together."""
CPU_FEATURES: Final = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16")
"""What a CPU must have, as /proc/cpuinfo names it."""

_SOURCES: Final = Path(__file__).parent / "csrc"
_FLAGS: Final = (
    "-O3",
    "-std=c++20",
    "-shared",
    "-fPIC",
    "-fopenmp",
    "-DAT_PARALLEL_OPENMP=1",
    "-mavx2",
    "-mfma",
    *(f"-m{feature.replace('_', '')}" for feature in CPU_FEATURES),
)
_TIME_LIMIT_S: Final = 300

_log = structlog.get_logger()


class KernelsUnavailable(Exception):
    """This machine cannot have the operators; the text says why and what would help."""


def load_kernels(cache_dir: Path) -> None:
    """Make torch.ops.galley usable in this process, building it first if need be (about 12 s). Idempotent.

    Raises KernelsUnavailable with the reason: this CPU cannot, there is no compiler, or no room in the cache.
    """
    if hasattr(torch.ops.galley, "attend"):
        return
    if lacking := lacking_features():
        raise KernelsUnavailable(f"the CPU has no {', '.join(lacking)}")
    try:
        library = _build(cache_dir.expanduser() / "kernels")
        torch.ops.load_library(library)  # type: ignore[no-untyped-call]
    except OSError as error:
        raise KernelsUnavailable(str(error)) from error


def lacking_features() -> list[str]:
    """Those of CPU_FEATURES that this CPU has not."""
    present = cpu_features()
    return [feature for feature in CPU_FEATURES if feature not in present]


def compiler() -> str | None:
    """The C++ compiler that would be used; None when there is none."""
    return shutil.which("g++") or shutil.which("clang++")


def sources_digest() -> str:
    """Names the operators' exact source, flags and torch."""
    digest = hashlib.blake2b(digest_size=8)
    for file in sorted(_SOURCES.iterdir()):
        digest.update(file.read_bytes())
    digest.update(repr((_FLAGS, torch.__version__)).encode())
    return digest.hexdigest()


def _build(directory: Path) -> Path:
    library = directory / f"galley-{sources_digest()}.so"
    if is_sound(library):
        return library
    program = compiler()
    if program is None:
        raise KernelsUnavailable("there is no C++ compiler: install g++")
    with locked(directory / ".lock"):
        if is_sound(library):
            return library
        begin = time.monotonic()
        _log.info("building CPU kernels, once", compiler=program)
        # A directory of its own: the compiler of a killed worker goes on, and writes to that one's.
        with scratch(directory) as made_in:
            _compile(program, made_in / library.name)
            publish(made_in / library.name, library)
        _log.info("CPU kernels built", seconds=round(time.monotonic() - begin, 1))
    return library


def _compile(program: str, target: Path) -> None:
    root = Path(torch.__file__).parent
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    command = [
        program,
        *_FLAGS,
        abi,
        f"-I{root / 'include'}",
        *sorted(map(str, _SOURCES.glob("*.cpp"))),
        "-o",
        str(target),
    ]
    command += [f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIME_LIMIT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise KernelsUnavailable(f"{program}: {error}") from error
    if done.returncode:
        raise KernelsUnavailable(f"{program} failed: {done.stderr.strip()[-500:]}")


def cpu_features() -> set[str]:
    """What this CPU can do, as /proc/cpuinfo names it; empty where that is not known."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    flags = next((line for line in lines if line.startswith("flags")), "")
    return set(flags.split()) if os.uname().machine == "x86_64" else set()
