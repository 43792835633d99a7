"""A KV pool in a directory: in /dev/shm for one machine, on NVMe, or on a file system that machines share.

Knows how calls, directory and framing go together; each of them is a module of its own.
"""

import time
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from pathlib import Path

from common.errors import ConfigError, KVPoolUnavailable
from common.kv.pool import directory, framing
from common.kv.pool.base import PoolMeter
from common.kv.pool.calls import BlockingPool, Call, PoolCalls
from common.kv.pool.directory import Directory

THREADS = 4


class FilePool(BlockingPool):
    """A KVPool. Use `open`."""

    def __init__(self, path: Path, block_bytes: int, max_bytes: int, calls: PoolCalls, meter: PoolMeter):
        super().__init__(block_bytes, calls, meter)
        self._path = path
        self._framed_bytes = framing.HEADER_BYTES + block_bytes
        self._max_bytes = max_bytes

    @classmethod
    async def open(
        cls, path: Path, block_bytes: int, meter: PoolMeter, *, max_bytes: int | None, timeout_s: float
    ) -> "FilePool":
        """Makes the directory if it is not there. Raises ConfigError."""
        size = framing.HEADER_BYTES + block_bytes
        calls = PoolCalls(timeout_s, THREADS, meter)
        found: list[directory.Limits] = []
        try:
            await calls.run(lambda call: found.append(directory.create(path, size, max_bytes, call.pause)))
        except KVPoolUnavailable as error:
            raise ConfigError(f"kv_pool: {path} cannot be used: {error.message}") from None
        return cls(path, block_bytes, found[0].max_bytes, calls, meter)

    async def close(self) -> None:
        await self._calls.close()

    def _match(self, names: Seq[bytes], call: Call) -> None:
        with self._directory(call) as objects:
            for name in names:
                call.check()
                if not objects.has(name):
                    return
                call.done += 1

    def _load(self, names: Seq[bytes], blocks: Seq[memoryview], call: Call) -> None:
        framed = memoryview(bytearray(self._framed_bytes + 1))
        with self._directory(call) as objects:
            for name, block, used in zip(names, blocks, _times(len(names)), strict=True):
                size = objects.read(name, framed, used)
                if size is None:
                    return
                if size != self._framed_bytes or not framing.is_intact(framed[:size], name):
                    call.events["corrupt"] += 1
                    objects.remove(name)
                    return
                call.copy(block, framed[framing.HEADER_BYTES : size])
                call.done += 1

    def _publish(self, names: Seq[bytes], blocks: Seq[memoryview], call: Call) -> None:
        framed = memoryview(bytearray(self._framed_bytes))
        keep = frozenset(map(directory.file_name, names))
        with self._directory(call) as objects:
            for name, block, used in zip(names, blocks, _times(len(names)), strict=True):
                call.check()
                if not objects.touch(name, used):
                    call.copy(framed[framing.HEADER_BYTES :], block)
                    framing.write_header(framed, name)
                    there, evicted = objects.write(name, framed, used, keep)
                    call.events["evicted"] += evicted
                    call.events["published" if there else "refused"] += 1
                    if not there:
                        return  # what follows could not be found without it
                call.done += 1

    @contextmanager
    def _directory(self, call: Call) -> Iterator[Directory]:
        """Opened for each call, so that one that vanished and came back, or was emptied, is found again."""
        try:
            with directory.opened(self._path) as root:
                yield Directory.of(root, self._framed_bytes, self._max_bytes, call.pause)
        except ConfigError as error:
            raise OSError(error.message) from error


def _times(blocks: int) -> range:
    """When each of the blocks of one call counts as used, in ns: earlier the further behind in the prefix,
    as the end of a prefix is of no use without its beginning and should be evicted first."""
    now = time.time_ns()
    return range(now, now - 1000 * blocks, -1000)
