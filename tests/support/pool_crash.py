"""Publishes into a directory and dies by SIGKILL before every line of common/kv/pool/directory.py, one after
the other: `python -m tests.support.pool_crash DIR`.

After each death, what the next process would find is checked. Prints how many deaths there were. Forks, so
it is a program of its own without threads.
"""

import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

from common.kv.pool import directory, framing
from common.kv.pool.directory import PAGE, Directory

BLOCK_BYTES = 2 * PAGE - framing.HEADER_BYTES
CAPACITY = 3


class Killer:
    """A trace function that ends the process before the `at`-th line of directory.py."""

    def __init__(self, at: int) -> None:
        self._left = at

    def __call__(self, frame: FrameType, event: str, arg: Any) -> "Killer | None":
        if frame.f_code.co_filename != directory.__file__:
            return None
        if event == "line":
            self._left -= 1
            if not self._left:
                os.kill(os.getpid(), signal.SIGKILL)
        return self


def name(number: int) -> bytes:
    return number.to_bytes(16, "big")


def framed(number: int) -> memoryview:
    view = memoryview(bytearray([number % 251]) * (framing.HEADER_BYTES + BLOCK_BYTES))
    framing.write_header(view, name(number))
    return view


def publish(path: Path, number: int) -> None:
    with directory.opened(path) as root:
        objects = Directory.of(root, len(framed(number)), CAPACITY * 2 * PAGE, time.sleep)
        there, _ = objects.write(name(number), framed(number), time.time_ns(), ())
        assert there


def publish_and_die(path: Path, number: int, at: int) -> bool:
    """Whether it died; False when it was done before that many lines."""
    child = os.fork()
    if not child:
        write = os.write
        os.write = lambda file, data: write(
            file, memoryview(data)[: PAGE + 1]
        )  # so that an object takes two writes
        sys.settrace(Killer(at))
        publish(path, number)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or not os.waitstatus_to_exitcode(status)
    return os.WIFSIGNALED(status)


def check(path: Path, number: int) -> None:
    """All there is to read is intact, and all there is, what the dead left included, is within the bound."""
    files = [file for file in path.glob("????/*") if file.name != ".lock"]
    assert sum(directory.pages(file.stat().st_size) for file in files) <= CAPACITY * 2 * PAGE
    for file in files:
        if file.name != ".new":
            assert framing.is_intact(memoryview(file.read_bytes()), bytes.fromhex(file.name))
    publish(path, number)
    assert not list(path.glob("????/.new"))


def main() -> None:
    path = Path(sys.argv[1])
    path.mkdir(mode=0o700)
    number = deaths = 0
    while publish_and_die(path, number, deaths + 1):
        deaths += 1
        number += 1
        check(path, number)
        number += 1
        if deaths < 30:  # the first publish of all makes pool.json and the shard
            for file in sorted(path.rglob("*"), reverse=True):
                file.rmdir() if file.is_dir() else file.unlink()
    sys.stdout.write(f"{deaths}\n")


if __name__ == "__main__":
    main()
