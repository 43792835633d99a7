"""How our operators come to a machine: built once, by one of several, or not at all and then with the reason.

A script stands for the compiler, and nothing is loaded.
"""

import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from common.engine import kernels
from common.engine.kernels import KernelsUnavailable, load_kernels
from common.engine.runner_torch import TorchRunner
from tests.support.tiny_models import make_tiny_model
from tests.support.torch_driver import Driver

ALL_FEATURES = set(kernels.CPU_FEATURES)


class Machine:
    """A capable CPU, no operators loaded yet, and a compiler that writes its last word to the library."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cache = directory / "cache"
        self.loaded: list[Path] = []
        self._calls = directory / "calls"
        self._compiler = directory / "g++"
        self.compiler_does('while [ "$1" != -o ]; do shift; done; echo library > "$2"')
        monkeypatch.setattr(kernels, "cpu_features", lambda: ALL_FEATURES)
        monkeypatch.setattr(kernels, "compiler", lambda: str(self._compiler))
        operators = SimpleNamespace()
        monkeypatch.setattr(torch.ops, "galley", operators)
        monkeypatch.setattr(torch.ops, "load_library", self.loaded.append)

    def compiler_does(self, what: str) -> None:
        self._compiler.write_text(f"#!/bin/sh\necho called >> {self._calls}\n{what}\n")
        self._compiler.chmod(0o755)

    @property
    def compilations(self) -> int:
        return len(self._calls.read_text().splitlines()) if self._calls.exists() else 0

    @property
    def left(self) -> list[str]:
        return sorted(
            path.name for path in (self.cache / "kernels").iterdir() if not path.name.endswith(".lock")
        )


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_built_once_then_found(machine: Machine) -> None:
    load_kernels(machine.cache)
    load_kernels(machine.cache)
    library = machine.cache / "kernels" / f"galley-{kernels.sources_digest()}.so"
    assert machine.loaded == [library, library]
    assert library.read_text() == "library\n"
    assert machine.left == [library.name, f"{library.name}.digest"]
    assert machine.compilations == 1


@pytest.mark.parametrize("damage", ["librar", "", "library?"])
def test_a_damaged_library_is_built_again(machine: Machine, damage: str) -> None:
    load_kernels(machine.cache)
    library = machine.loaded[0]
    library.write_text(damage)
    load_kernels(machine.cache)
    assert library.read_text() == "library\n"
    assert machine.compilations == 2


def test_not_loaded_twice(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops, "galley", SimpleNamespace(attend=None))
    load_kernels(machine.cache)
    assert machine.loaded == []


def test_other_sources_or_flags_are_another_library(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = kernels.sources_digest()
    monkeypatch.setattr(kernels, "_FLAGS", (*kernels._FLAGS, "-g"))
    flags = kernels.sources_digest()
    (machine.cache / "csrc").mkdir(parents=True)
    monkeypatch.setattr(kernels, "_SOURCES", machine.cache / "csrc")
    assert len({before, flags, kernels.sources_digest()}) == 3


def test_of_two_at_once_one_builds(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have seen that there is no library before either takes the lock."""
    both, program = threading.Barrier(2, timeout=30), kernels.compiler()

    def compiler() -> str | None:
        both.wait()
        return program

    monkeypatch.setattr(kernels, "compiler", compiler)
    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(load_kernels, machine.cache) for _ in range(2)]:
            done.result()
    assert len(machine.loaded) == 2
    assert machine.compilations == 1


def test_an_interrupted_build_leaves_nothing(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(command: list[str], **_others: object) -> None:
        Path(command[command.index("-o") + 1]).write_text("half a libr")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            load_kernels(machine.cache)
    assert machine.left == []
    load_kernels(machine.cache)
    assert machine.loaded[0].read_text() == "library\n"


def test_what_a_killed_build_left_is_removed_and_its_compiler_does_no_harm(machine: Machine) -> None:
    """The compiler goes on where only its parent was killed, and writes when the next build does."""
    left = machine.cache / "kernels" / "scratch-1-killed"
    left.mkdir(parents=True)
    (left / "half").write_text("half a libr")
    paths = machine.cache.parent / "paths"
    machine.compiler_does(f'while [ "$1" != -o ]; do shift; done; echo "$2" >> {paths}; echo library > "$2"')
    load_kernels(machine.cache)
    library = machine.loaded[0]
    assert machine.left == [library.name, f"{library.name}.digest"]
    library.unlink()
    load_kernels(machine.cache)
    assert len(set(paths.read_text().split())) == 2


def test_a_failing_compiler_is_quoted(machine: Machine) -> None:
    machine.compiler_does("echo 'fatal error: torch/library.h: No such file' >&2; exit 1")
    with pytest.raises(KernelsUnavailable, match=r"failed: fatal error: torch/library\.h: No such file"):
        load_kernels(machine.cache)
    assert machine.left == []


def test_a_compiler_that_hangs_is_ended(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.compiler_does("exec sleep 600")
    monkeypatch.setattr(kernels, "_TIME_LIMIT_S", 0.1)
    with pytest.raises(KernelsUnavailable, match=r"timed out after 0\.1 seconds"):
        load_kernels(machine.cache)


def test_a_compiler_that_cannot_be_run_is_named(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "compiler", lambda: "/nowhere/g++")
    with pytest.raises(KernelsUnavailable, match=r"/nowhere/g\+\+"):
        load_kernels(machine.cache)


def test_no_compiler(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "compiler", lambda: None)
    with pytest.raises(KernelsUnavailable, match=r"no C\+\+ compiler: install g\+\+"):
        load_kernels(machine.cache)


def test_a_cpu_that_lacks_something(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "cpu_features", lambda: ALL_FEATURES - {"avx512_bf16", "avx512vl"})
    with pytest.raises(KernelsUnavailable, match="the CPU has no avx512vl, avx512_bf16"):
        load_kernels(machine.cache)
    assert machine.compilations == 0


def test_a_cache_that_cannot_be_written(machine: Machine) -> None:
    machine.cache.write_text("in the way")
    with pytest.raises(KernelsUnavailable, match="cache"):
        load_kernels(machine.cache)


def test_a_library_that_cannot_be_loaded(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(library: Path) -> None:
        raise OSError(f"{library.name}: file too short")

    monkeypatch.setattr(torch.ops, "load_library", load)
    with pytest.raises(KernelsUnavailable, match=r"galley-\w+\.so: file too short"):
        load_kernels(machine.cache)


def test_without_them_the_runner_serves_all_the_same(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernels, "compiler", lambda: None)
    directory = make_tiny_model("llama", machine.cache.parent / "model", head_dim=32)
    runner = TorchRunner(
        directory, dtype="bfloat16", num_blocks=8, threads=1, cache_dir=machine.cache, block_size=16
    )
    assert "install g++" in capsys.readouterr().out
    assert runner.compile() == runner.mode == "eager"
    driver = Driver(runner)
    assert len(driver.run([driver.text([5, 6, 7])], 4)[0]) == 4
