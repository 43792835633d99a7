"""What a figure was measured on: the machine, the versions and the state of the code.

Reads /proc, package metadata and git. Knows nothing of the figures.
"""

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def describe_machine() -> dict[str, str | int | float]:
    """CPU model, cores (of the machine, and usable by this process), memory in GiB, versions, GPUs if any.

    A package that is not installed is "". Memory is the machine's, or the container's limit if lower.
    """
    facts: dict[str, str | int | float] = {
        "cpu": _cpu_model(),
        "cores": os.cpu_count() or 0,
        "cores_usable": len(os.sched_getaffinity(0)),
        "memory_gib": round(_memory_bytes() / 2**30, 1),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": _package_version("torch"),
        "transformers": _package_version("transformers"),
        "ucxx": _package_version("ucxx-cu12"),
    }
    if gpus := _gpus():
        facts["gpus"] = ", ".join(gpus)
    return facts


def describe_version() -> str:
    """The project's version and commit, as 0.1.0+g1a2b3c4, with .dirty when tracked files differ from it."""
    version = _package_version("galley") or "0"
    commit = _git("rev-parse", "--short", "HEAD")
    if not commit:
        return version
    dirty = ".dirty" if _git("status", "--porcelain", "--untracked-files=no") else ""
    return f"{version}+g{commit}{dirty}"


def _cpu_model() -> str:
    for line in _read(Path("/proc/cpuinfo")).splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def _memory_bytes() -> int:
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _read(Path("/sys/fs/cgroup/memory.max")).strip()
    return min(installed, int(limit)) if limit.isdecimal() else installed


def _gpus() -> list[str]:
    lines = [
        line
        for file in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
        for line in _read(file).splitlines()
    ]
    return [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]


def _package_version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ("git", *arguments), cwd=ROOT, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
