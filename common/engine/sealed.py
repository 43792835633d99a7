"""Files that are built once into a cache and then trusted with a process: each has its digest beside it.

A file that was cut short or changed on disk would crash whoever loads it as code; so it is no file.
"""

import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds the lock file `path`, so that of several processes one builds and the others find it built."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def is_sound(path: Path) -> bool:
    """Whether `path` is there and as it was published."""
    try:
        return _digest_path(path).read_bytes() == _digest(path).encode()
    except OSError:
        return False


def publish(made: Path, path: Path) -> None:
    """Move `made`, on the same file system, to `path`, for good. Raises OSError."""
    with made.open("rb") as stream:
        os.fsync(stream.fileno())
    _digest_path(path).write_text(_digest(made))
    made.rename(path)


def _digest(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()


def _digest_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.digest")
