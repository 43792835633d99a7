"""A scratch directory lives as long as its work, and no longer than its process."""

import subprocess
import sys
from pathlib import Path

import pytest

from common.engine.scratch import scratch


def left(parent: Path) -> list[str]:
    return [path.name for path in parent.iterdir() if path.is_dir()]


@pytest.mark.parametrize("failure", [None, RuntimeError])
def test_it_is_gone_with_the_block(failure: type[Exception] | None, tmp_path: Path) -> None:
    parent = tmp_path / "not" / "there"
    try:
        with scratch(parent) as directory:
            (directory / "deep").mkdir()
            (directory / "deep" / "file").write_text("some")
            assert directory.parent == parent
            if failure:
                raise failure
    except RuntimeError:
        pass
    assert left(parent) == []


def test_those_in_use_are_left_alone(tmp_path: Path) -> None:
    with scratch(tmp_path) as one:
        with scratch(tmp_path) as other:
            assert one != other
            assert one.is_dir()
        assert left(tmp_path) == [one.name]


HOLDER = """
import sys
from pathlib import Path
from common.engine.scratch import scratch

with scratch(Path(sys.argv[1])) as directory:
    (directory / "file").write_text("some")
    print("made", flush=True)
    sys.stdin.read()
"""


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path: Path) -> None:
    (tmp_path / "model.pt2").mkdir()  # of others
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"made\n"
        holder.kill()
    assert len(left(tmp_path)) == 2
    with scratch(tmp_path) as mine:
        assert sorted(left(tmp_path)) == sorted(["model.pt2", mine.name])
