"""What becomes of compiling when the child fails, hangs, is stopped or has nothing to do.

Nothing is compiled: a script stands for the Python of the child.
"""

import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from common.engine import graph_compiler, kernels
from common.engine.graph_compiler import CompileFailed, GraphCompiler
from common.engine.loading import load_model
from common.engine.runner_torch import TorchRunner
from common.kv.layout import KVLayout
from common.messages.generation import SamplingParams
from tests.support.kernels import cache_with_kernels
from tests.support.tiny_models import make_tiny_model
from tests.support.torch_driver import Driver

LAYOUT = KVLayout(kv_heads=3, num_layers=3, block_size=16, head_dim=32, dtype="bfloat16")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("llama"), head_dim=32)


class Child:
    """A GraphCompiler whose child runs a script instead of compiling."""

    def __init__(self, directory: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.compiler = GraphCompiler(directory, load_model(directory, "bfloat16", "cpu"), LAYOUT, scratch)
        self.arguments = scratch / "arguments"
        self._script = scratch / "python"
        monkeypatch.setattr(sys, "executable", str(self._script))
        monkeypatch.setattr(kernels, "compiler", lambda: "g++")

    def does(self, what: str) -> None:
        self._script.write_text(f'#!/bin/sh\necho "$@" > {self.arguments}\n{what}\n')
        self._script.chmod(0o755)


@pytest.fixture
def child(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Child:
    return Child(directory, tmp_path, monkeypatch)


# --- the child -------------------------------------------------------------------------------------


def test_the_child_is_told_what_to_compile(child: Child, directory: Path, tmp_path: Path) -> None:
    child.does("exit 3")
    with pytest.raises(CompileFailed, match="exit 3"):
        child.compiler.run()
    module, name, *told = child.arguments.read_text().split(maxsplit=2)
    assert [module, name] == ["-m", "common.engine.compile_graph"]
    where, rest = told[0].split(maxsplit=1)
    layout, cache_dir = rest.strip().rsplit(maxsplit=1)
    assert (Path(where), KVLayout(**json.loads(layout)), Path(cache_dir)) == (directory, LAYOUT, tmp_path)


def test_a_failure_is_the_last_line_it_said(child: Child) -> None:
    child.does("echo Traceback >&2; echo 'RuntimeError: no such operator' >&2; exit 1")
    with pytest.raises(CompileFailed, match=r"^RuntimeError: no such operator$"):
        child.compiler.run()


def test_a_child_that_was_killed_is_a_failure(child: Child) -> None:
    child.does("kill -9 $$")
    with pytest.raises(CompileFailed, match="exit -9"):
        child.compiler.run()


def test_a_child_that_made_nothing_is_a_failure(child: Child) -> None:
    child.does("exit 0")
    with pytest.raises(CompileFailed, match=child.compiler.library.name):
        child.compiler.run()


def test_a_library_that_cannot_be_loaded_is_a_failure(child: Child) -> None:
    library = child.compiler.library
    child.does(f"mkdir -p {library.parent}; echo rubbish > {library}")
    with pytest.raises(CompileFailed, match=library.name):
        child.compiler.run()
    assert not child.compiler.is_cached  # it was not published, so it is compiled again
    child.arguments.unlink()
    with pytest.raises(CompileFailed):
        child.compiler.run()
    assert child.arguments.exists()


def test_a_child_without_end_is_ended(child: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_compiler, "_TIME_LIMIT_S", 0.2)
    child.does("exec sleep 600")
    with pytest.raises(CompileFailed, match=r"not done after 0\.2 s"):
        child.compiler.run()


def test_stop_ends_the_child_and_what_it_started(child: Child, tmp_path: Path) -> None:
    """The pipe is opened when a grandchild writes to it, and ends when nobody can any more."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    child.does(f"sleep 600 > {pipe} & exec sleep 600")
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(child.compiler.run)
        with pipe.open("rb") as stream:
            child.compiler.stop()
            assert stream.read() == b""
        with pytest.raises(CompileFailed, match="stopped"):
            running.result(30)


def test_after_stop_nothing_is_started(child: Child) -> None:
    child.does("exec sleep 600")
    child.compiler.stop()
    with pytest.raises(CompileFailed, match="stopped"):
        child.compiler.run()


def test_without_a_compiler_no_child_is_started(child: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    child.does("exit 0")
    monkeypatch.setattr(kernels, "compiler", lambda: None)
    with pytest.raises(CompileFailed, match=r"install g\+\+"):
        child.compiler.run()
    assert not child.arguments.exists()


# --- what is left ----------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["exit 0", "exit 1", "kill -9 $$"])
def test_the_childs_scratch_is_beside_the_graphs_and_gone(child: Child, what: str, tmp_path: Path) -> None:
    child.does(f"touch $TMPDIR/some; echo $TMPDIR > {tmp_path}/where; {what}")
    with pytest.raises(CompileFailed):
        child.compiler.run()
    where = Path((tmp_path / "where").read_text().strip())
    assert where.parent == child.compiler.library.parent
    assert [path for path in where.parent.iterdir() if path.is_dir()] == []


def test_a_cache_that_cannot_be_written_is_a_failure(child: Child, tmp_path: Path) -> None:
    (tmp_path / "graphs").write_text("in the way")
    child.does("exit 0")
    with pytest.raises(CompileFailed, match="graphs"):
        child.compiler.run()


def test_a_failure_is_remembered_for_a_day(child: Child) -> None:
    child.does("echo 'RuntimeError: no such operator' >&2; exit 1")
    with pytest.raises(CompileFailed, match=r"^RuntimeError: no such operator$"):
        child.compiler.run()
    child.arguments.unlink()
    with pytest.raises(CompileFailed, match=r"RuntimeError: no such operator \(0 min ago; .*\.failed\)$"):
        child.compiler.run()
    assert not child.arguments.exists()
    remembered = child.compiler.library.with_suffix(".failed")
    day = time.time() - 24 * 3600
    os.utime(remembered, (day + 60, day + 60))
    with pytest.raises(CompileFailed, match=r"\(1439 min ago"):
        child.compiler.run()
    remembered.write_bytes(b"\xff spoilt")
    with pytest.raises(CompileFailed, match="spoilt"):
        child.compiler.run()
    os.utime(remembered, (day - 60, day - 60))
    child.does("exit 0")
    with pytest.raises(CompileFailed):
        child.compiler.run()
    assert child.arguments.exists()
    assert not remembered.exists()  # this time the child ended well


@pytest.mark.parametrize("end", ["kill -9 $$", "exec sleep 600"])
def test_a_child_that_others_ended_is_tried_again(child: Child, end: str) -> None:
    child.does(end)
    if "sleep" in end:
        child.compiler.stop()
    with pytest.raises(CompileFailed):
        child.compiler.run()
    assert not child.compiler.library.with_suffix(".failed").exists()


# --- the runner that has it compiled ---------------------------------------------------------------


@pytest.mark.kernels
@pytest.mark.usefixtures("operators")
def test_a_runner_goes_on_as_it_is_when_compiling_fails(
    child: Child, directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    child.does("echo 'RuntimeError: no such operator' >&2; exit 1")
    runner = TorchRunner(
        directory, dtype="bfloat16", num_blocks=8, threads=1, cache_dir=cache_with_kernels(tmp_path)
    )
    driver = Driver(runner)
    expected = driver.run([driver.text([5, 6, 7])], 4)
    assert runner.compile() == runner.mode == "eager"
    assert "RuntimeError: no such operator" in capsys.readouterr().out
    assert driver.run([driver.text([5, 6, 7])], 4) == expected


@pytest.mark.kernels
@pytest.mark.usefixtures("operators")
def test_a_runner_that_is_not_to_compile_does_not(child: Child, directory: Path, tmp_path: Path) -> None:
    child.does("exit 1")
    cache = cache_with_kernels(tmp_path)
    for dtype, wanted in (("bfloat16", False), ("float32", True)):
        runner = TorchRunner(
            directory, dtype=dtype, num_blocks=8, threads=1, cache_dir=cache, compile_model=wanted
        )
        assert runner.compile() == "eager"
        runner.stop_compiling()
    assert not child.arguments.exists()


@pytest.mark.kernels
@pytest.mark.usefixtures("operators")
def test_bits_can_be_had_without_compiling(child: Child, directory: Path, tmp_path: Path) -> None:
    """Every token alone: the tokens of others cannot matter."""
    child.does("exit 1")
    runner = TorchRunner(
        directory,
        dtype="bfloat16",
        num_blocks=64,
        threads=1,
        cache_dir=cache_with_kernels(tmp_path),
        deterministic=True,
    )
    assert runner.mode == "eager"
    params = SamplingParams(max_tokens=4, seed=0, temperature=0.0, logprobs=3, prompt_logprobs=0)
    prompts = [[7 * i + j for j in range(n)] for i, n in enumerate((1, 17, 40, 5))]
    driver = Driver(runner)
    alone = [driver.text(prompt, params) for prompt in prompts]
    for text in alone:
        driver.run([text], 4)
    together = [driver.text(prompt, params) for prompt in prompts]
    driver.run(together, 4, chunk=9)
    for one, other in zip(alone, together, strict=True):
        assert one.sampled == other.sampled
        assert one.scores == other.scores
