"""Objects in a directory that several processes share: bounded, and whole after kill -9 at any instant.

    DIR/pool.json           version, max_bytes, shards: the same for everybody
    DIR/002f/HEX-OF-NAME    an object, complete since the rename that put it there
    DIR/002f/.new           the one object of this shard that is being written
    DIR/002f/.lock          flocked by whoever writes or evicts in this shard

There is no index and no counter that a crash could leave wrong: a name belongs to one shard, the bound
holds for each shard by itself (max_bytes / shards), and who publishes lists the shard, some 64 to 128
objects, while it holds the lock. A left-over `.new` is overwritten by the next to publish there. The
modification time of an object is when it was last used. A reader holds a shared flock on what it reads,
an evictor needs it alone; both end with their process. All of this blocks. Knows nothing of what is in
an object.
"""

import contextlib
import errno
import fcntl
import os
import stat
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson

from common.errors import ConfigError

VERSION = 1
PAGE = 4096
SHARD_OBJECTS = 64
MAX_SHARDS = 1 << 16
_LOCK_RETRY_S = 0.001


@dataclass(frozen=True, slots=True)
class Limits:
    """What pool.json says."""

    version: int
    max_bytes: int
    shards: int

    @property
    def shard_bytes(self) -> int:
        return self.max_bytes // self.shards


def pages(size: int) -> int:
    """What a file of `size` bytes takes of the bound."""
    return -(-size // PAGE) * PAGE


def file_name(name: bytes) -> str:
    """Of the object `name`, in its shard."""
    return name.hex()


def limits_for(max_bytes: int, object_bytes: int) -> Limits:
    """As many shards as leave SHARD_OBJECTS objects to each. Raises ConfigError: no room for one object."""
    capacity = max_bytes // pages(object_bytes)
    if not capacity:
        raise ConfigError(f"kv_pool: max_bytes = {max_bytes} is too small for blocks of {object_bytes} bytes")
    shards = 1
    while shards < MAX_SHARDS and capacity // (2 * shards) >= SHARD_OBJECTS:
        shards *= 2
    return Limits(VERSION, max_bytes, shards)


def create(path: Path, object_bytes: int, max_bytes: int | None, pause: Callable[[float], None]) -> Limits:
    """Make the pool in `path` unless it is there, and check that it is as asked for.

    Without `max_bytes`, what the pool has, or for a new one a quarter of the free space. Raises ConfigError.
    """
    with contextlib.suppress(FileExistsError):
        try:
            path.mkdir(mode=0o700)
        except FileNotFoundError:
            raise ConfigError(f"kv_pool: {path.parent} does not exist; make it first") from None
    with opened(path) as root:

        def new() -> Limits:
            free = os.fstatvfs(root)
            return limits_for(max_bytes or free.f_bavail * free.f_frsize // 4, object_bytes)

        limits = _limits(root, new, pause)
    if max_bytes is not None and limits.max_bytes != max_bytes:
        raise ConfigError(
            f"kv_pool: max_bytes of {path} is {limits.max_bytes} for all that use it, not {max_bytes}; "
            f"to change it, stop them and remove the directory"
        )
    if pages(object_bytes) > limits.shard_bytes:
        raise ConfigError(
            f"kv_pool: {path} with {limits.max_bytes} bytes in {limits.shards} shards is too small "
            f"for blocks of {object_bytes} bytes; give a larger max_bytes or a directory of its own"
        )
    return limits


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """The directory as a file descriptor, so that nothing can be put in its place meanwhile.

    Raises ConfigError unless it is ours alone, OSError.
    """
    try:
        root = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP):
            raise ConfigError(f"kv_pool: {path} is not a directory") from None
        raise
    try:
        found = os.fstat(root)
        if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ConfigError(
                f"kv_pool: {path} must belong to the user {os.geteuid()} of this process and have mode 0700; "
                f"it belongs to {found.st_uid} and has mode {stat.S_IMODE(found.st_mode):04o}"
            )
        yield root
    finally:
        os.close(root)


class Directory:
    """The objects under an open directory; for one call in one thread. All methods raise OSError.

    `pause` waits between two looks at a lock that another holds, and raises to give up.
    """

    def __init__(self, root: int, limits: Limits, pause: Callable[[float], None]) -> None:
        self._root = root
        self._limits = limits
        self._pause = pause

    @classmethod
    def of(cls, root: int, object_bytes: int, max_bytes: int, pause: Callable[[float], None]) -> "Directory":
        """With the limits that pool.json has, or gets now if somebody emptied the directory."""
        return cls(root, _limits(root, lambda: limits_for(max_bytes, object_bytes), pause), pause)

    def has(self, name: bytes) -> bool:
        try:
            os.stat(self._path(name), dir_fd=self._root)
        except FileNotFoundError:
            return False
        return True

    def touch(self, name: bytes, used_ns: int) -> bool:
        """Note that the object was used; False if it is not there."""
        try:
            os.utime(self._path(name), ns=(used_ns, used_ns), dir_fd=self._root)
        except FileNotFoundError:
            return False
        return True

    def read(self, name: bytes, target: memoryview, used_ns: int) -> int | None:
        """Fill `target` with the object. How many bytes it has, or None if it is not there.

        One more byte in `target` than an object should have shows one that is too long.
        """
        try:
            file = os.open(self._path(name), os.O_RDONLY | os.O_NOFOLLOW, dir_fd=self._root)
        except FileNotFoundError:
            return None
        try:
            if not _try_lock(file, fcntl.LOCK_SH) or not os.fstat(file).st_nlink:
                return None  # evicted between our open and our lock
            count = 0
            while read := os.preadv(file, [target[count:]], count):
                count += read
            os.utime(file, ns=(used_ns, used_ns))
            return count
        finally:
            os.close(file)

    def write(self, name: bytes, framed: memoryview, used_ns: int, keep: Collection[str]) -> tuple[bool, int]:
        """Publish `framed` as `name`, evicting what was not used for longest, but no file named in `keep`.

        Whether it is there now, and how many others were evicted for it.
        """
        with self._locked(self._shard(name)) as shard:
            if self.touch(name, used_ns):
                return True, 0  # by somebody else, while we waited for the lock
            room, evicted = self._make_room(shard, pages(len(framed)), keep)
            if room:
                _write(shard, ".new", framed, used_ns)
                os.rename(".new", file_name(name), src_dir_fd=shard, dst_dir_fd=shard)
            return room, evicted

    def remove(self, name: bytes) -> bool:
        """False if it is not there or is being read."""
        return _remove(self._path(name), self._root)

    def _make_room(self, shard: int, size: int, keep: Collection[str]) -> tuple[bool, int]:
        """Whether `size` more bytes are within the bound now, and how many objects went for it."""
        objects = _objects(shard)
        excess = sum(taken for _, taken, _ in objects) + size - self._limits.shard_bytes
        evicted = 0
        for _, taken, file in sorted(objects):
            if excess <= 0:
                break
            if file not in keep and _remove(file, shard):
                excess -= taken
                evicted += 1
        return excess <= 0, evicted

    @contextmanager
    def _locked(self, name: str) -> Iterator[int]:
        """The shard `name`, as an open directory in which nobody else writes or evicts."""
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=self._root)
        shard = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=self._root)
        try:
            with _lock_file(shard, self._pause):
                yield shard
        finally:
            os.close(shard)

    def _shard(self, name: bytes) -> str:
        return f"{int.from_bytes(name[:2], 'little') % self._limits.shards:04x}"

    def _path(self, name: bytes) -> str:
        return f"{self._shard(name)}/{file_name(name)}"


def _limits(root: int, new: Callable[[], Limits], pause: Callable[[float], None]) -> Limits:
    """What pool.json says, or if it is not there `new` from now on. Raises ConfigError, OSError."""
    try:
        return _read_limits(root)
    except FileNotFoundError:
        with _lock_file(root, pause):
            with contextlib.suppress(FileNotFoundError):
                return _read_limits(root)
            limits = new()
            _write(root, ".new", memoryview(orjson.dumps(asdict(limits))), time.time_ns())
            os.rename(".new", "pool.json", src_dir_fd=root, dst_dir_fd=root)
            return limits


def _read_limits(root: int) -> Limits:
    file = os.open("pool.json", os.O_RDONLY | os.O_NOFOLLOW, dir_fd=root)
    with open(file, "rb") as stream:
        text = stream.read(PAGE)
    try:
        limits = Limits(**orjson.loads(text))
        known = limits.version == VERSION and 0 < limits.shards <= MAX_SHARDS and limits.max_bytes > 0
    except (TypeError, ValueError):
        known = False
    if not known:
        raise ConfigError("kv_pool: pool.json is of another version; empty the directory or take another")
    return limits


def _objects(shard: int) -> list[tuple[int, int, str]]:
    """When last used, pages taken, file name; of all objects in the shard."""
    found: list[tuple[int, int, str]] = []
    with os.scandir(shard) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            with contextlib.suppress(FileNotFoundError):  # a reader found it damaged, and removed it
                status = entry.stat(follow_symlinks=False)
                found.append((status.st_mtime_ns, pages(status.st_size), entry.name))
    return found


def _remove(path: str, directory: int) -> bool:
    """Unlink a file unless it is not there or somebody reads it."""
    try:
        file = os.open(path, os.O_RDWR | os.O_NOFOLLOW, dir_fd=directory)
    except FileNotFoundError:
        return False
    try:
        if not _try_lock(file, fcntl.LOCK_EX):
            return False
        os.unlink(path, dir_fd=directory)
        return True
    except FileNotFoundError:
        return False
    finally:
        os.close(file)


def _write(directory: int, name: str, data: memoryview, used_ns: int) -> None:
    """A whole file, or none."""
    file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600, dir_fd=directory)
    try:
        while data:
            data = data[os.write(file, data) :]
        os.utime(file, ns=(used_ns, used_ns))
    except OSError:
        os.unlink(name, dir_fd=directory)
        raise
    finally:
        os.close(file)


@contextmanager
def _lock_file(directory: int, pause: Callable[[float], None]) -> Iterator[None]:
    file = os.open(".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600, dir_fd=directory)
    try:
        while not _try_lock(file, fcntl.LOCK_EX):
            pause(_LOCK_RETRY_S)  # flock cannot wait with a deadline; a lock is held for less than a ms
        yield
    finally:
        os.close(file)


def _try_lock(file: int, how: int) -> bool:
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
