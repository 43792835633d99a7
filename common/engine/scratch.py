"""Directories for one piece of work each, gone with it; what a killed process left is removed by the next.

A lock tells whether a directory is in use: containers that share a volume may have equal process ids.
Knows nothing of what the work is.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common.engine.sealed import locked


@contextmanager
def scratch(parent: Path) -> Iterator[Path]:
    """A new directory in `parent`, which is made if need be, while the block lasts. Raises OSError."""
    with locked(parent / ".scratch.lock"):
        for left in parent.glob("scratch-*"):
            _remove_unused(left)
        made = Path(tempfile.mkdtemp(prefix=f"scratch-{os.getpid()}-", dir=parent))
        lock = os.open(made, os.O_DIRECTORY)
        fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)
        os.close(lock)


def _remove_unused(directory: Path) -> None:
    try:
        lock = os.open(directory, os.O_DIRECTORY)
    except FileNotFoundError:  # its owner was faster
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    else:
        shutil.rmtree(directory, ignore_errors=True)
    finally:
        os.close(lock)
