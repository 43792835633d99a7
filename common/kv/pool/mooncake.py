"""A KV pool in the Mooncake Store: memory that workers lend, under one master that knows where objects are.

What the store does by itself, as `mooncake_master` sets it: an object is readable once it is complete, and
unfinished ones are reclaimed. Reading or asking for one gives it a lease of 10 s (`default_kv_lease_ttl`),
within which it is not evicted. From 90 % on (`eviction_high_watermark_ratio`) the least recently used go,
in steps of 5 %, in the background: in a burst a put may find no room meanwhile, which is `refused` here.
Evictions are counted by the master alone. A client that dies takes what it lent with it, which the master
notices after 10 s (`client_ttl`): until then a read whose first replica was there fails after a second, from
then on objects with another replica are readable. A master that restarts knows no objects; clients find it
again by themselves within seconds.

The store has no checksums, so objects are framed as in the file pool. Blocks are copied to and from memory of
our own that is registered with it, as a call that hangs must not own the caller's. All calls of the store
release Python's lock but `close`, which holds it for one or two seconds. This module alone imports mooncake.
"""

import ctypes
import mmap
import queue
import socket
import threading
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from typing import Protocol

from common.errors import ConfigError
from common.kv.pool import framing
from common.kv.pool.base import PoolMeter
from common.kv.pool.calls import BlockingPool, Call, PoolCalls

THREADS = 2
STAGING_BYTES = 16 * 2**20
"""For one call at a time, and at least for one block."""
LOCAL_BUFFER_BYTES = 2**20
"""The store's own staging, for calls that we do not make."""

NO_SPACE = -200
ALREADY_THERE = -705
RPC_FAILED = range(-999, -899)


@dataclass(frozen=True, slots=True)
class MooncakeOptions:
    """`host` is the name by which other clients reach this one; `segment_bytes` is what it lends."""

    master_host: str
    master_port: int
    host: str
    metadata: str = "P2PHANDSHAKE"
    segment_bytes: int = 512 * 2**20
    replicas: int = 1
    protocol: str = "tcp"
    devices: str = ""


class _ReplicateConfig(Protocol):
    replica_num: int


class _Store(Protocol):
    """Of mooncake.store.MooncakeDistributedStore what is used here. Numbers below zero are errors."""

    def setup(
        self,
        local_hostname: str,
        metadata_server: str,
        global_segment_size: int,
        local_buffer_size: int,
        protocol: str,
        rdma_devices: str,
        master_server_addr: str,
    ) -> int: ...

    def register_buffer(self, buffer_ptr: int, size: int) -> int: ...

    def batch_is_exist(self, keys: list[str]) -> list[int]: ...

    def batch_get_into(self, keys: list[str], buffer_ptrs: list[int], sizes: list[int]) -> list[int]: ...

    def batch_put_from(
        self, keys: list[str], buffer_ptrs: list[int], sizes: list[int], config: _ReplicateConfig
    ) -> list[int]: ...

    def remove(self, key: str, force: bool) -> int: ...

    def close(self) -> int: ...


class _Staging:
    """Memory for some objects in one piece, known to the store."""

    def __init__(self, store: _Store, object_bytes: int) -> None:
        self.objects = max(1, STAGING_BYTES // object_bytes)
        self._object_bytes = object_bytes
        memory = mmap.mmap(-1, self.objects * object_bytes)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._view = memoryview(memory)
        _succeeded(store.register_buffer(self._address, len(memory)))

    def __getitem__(self, index: int) -> memoryview:
        return self._view[index * self._object_bytes : (index + 1) * self._object_bytes]

    def places(self, count: int) -> tuple[list[int], list[int]]:
        """Addresses and sizes of the first `count` objects."""
        return [self._address + i * self._object_bytes for i in range(count)], [self._object_bytes] * count


class MooncakePool(BlockingPool):
    """A KVPool. Connects at the first call, or the first after a failure, in that call's time."""

    def __init__(
        self, options: MooncakeOptions, block_bytes: int, meter: PoolMeter, *, timeout_s: float
    ) -> None:
        """Raises ConfigError where the store is not installed."""
        try:
            from mooncake.store import MooncakeDistributedStore, ReplicateConfig
        except ImportError as error:
            raise ConfigError(
                "kv_pool: mooncake:// needs `pip install 'galley[pool]'` and the Debian packages "
                f"libcurl4, libibverbs1, librdmacm1 and libnuma1: {error}"
            ) from None
        super().__init__(block_bytes, PoolCalls(timeout_s, THREADS, meter), meter)
        self._new_store = MooncakeDistributedStore
        self._replication: _ReplicateConfig = ReplicateConfig()
        self._replication.replica_num = options.replicas
        self._options = options
        self._object_bytes = framing.HEADER_BYTES + block_bytes
        self._timeout_s = timeout_s
        self._connecting = threading.Lock()
        self._store: _Store | None = None
        self._stagings: queue.SimpleQueue[_Staging] = queue.SimpleQueue()

    async def close(self) -> None:
        """What this instance lent is gone with it. Holds Python's lock for a second or two."""
        await self._calls.close(self._leave)

    def _match(self, names: Seq[bytes], call: Call) -> None:
        found = _answered(self._connected().batch_is_exist(_keys(names)))
        call.done = _prefix(there == 1 for there in found)

    def _load(self, names: Seq[bytes], blocks: Seq[memoryview], call: Call) -> None:
        with self._staging() as (store, staging):
            for start in range(0, len(names), staging.objects):
                call.check()
                part = names[start : start + staging.objects]
                sizes = _answered(store.batch_get_into(_keys(part), *staging.places(len(part))))
                for index, (name, size) in enumerate(zip(part, sizes, strict=True)):
                    if size < 0:
                        return
                    framed = staging[index]
                    if size != self._object_bytes or not framing.is_intact(framed, name):
                        call.events["corrupt"] += 1
                        store.remove(_key(name), True)
                        return
                    call.copy(blocks[start + index], framed[framing.HEADER_BYTES :])
                    call.done += 1

    def _publish(self, names: Seq[bytes], blocks: Seq[memoryview], call: Call) -> None:
        with self._staging() as (store, staging):
            for start in range(0, len(names), staging.objects):
                part = names[start : start + staging.objects]
                there = [found == 1 for found in _answered(store.batch_is_exist(_keys(part)))]
                absent = [index for index, found in enumerate(there) if not found]
                for place, index in enumerate(absent):
                    call.copy(staging[place][framing.HEADER_BYTES :], blocks[start + index])
                    framing.write_header(staging[place], part[index])
                keys = _keys([part[index] for index in absent])
                results = store.batch_put_from(keys, *staging.places(len(absent)), self._replication)
                call.events["published"] += results.count(0)
                call.events["refused"] += results.count(NO_SPACE)
                for index, result in zip(absent, _answered(results), strict=True):
                    there[index] = result in (0, ALREADY_THERE)
                call.done += _prefix(there)
                if not all(there):
                    return  # what follows could not be found without it

    @contextmanager
    def _staging(self) -> Iterator[tuple[_Store, _Staging]]:
        """For one thread; there are as many as threads."""
        store = self._connected()
        staging = self._stagings.get_nowait()
        try:
            yield store, staging
        finally:
            self._stagings.put(staging)

    def _connected(self) -> _Store:
        """Raises OSError."""
        with self._connecting:
            if self._store is None:
                self._store = self._connect()
            return self._store

    def _connect(self) -> _Store:
        options = self._options
        # Without a master `setup` tries for 90 s, so see first that there is one.
        socket.create_connection((options.master_host, options.master_port), self._timeout_s).close()
        store: _Store = self._new_store()
        result = store.setup(
            options.host,
            options.metadata,
            options.segment_bytes,
            LOCAL_BUFFER_BYTES,
            options.protocol,
            options.devices,
            f"{options.master_host}:{options.master_port}",
        )
        _succeeded(result)
        for staging in [_Staging(store, self._object_bytes) for _ in range(THREADS)]:
            self._stagings.put(staging)
        return store

    def _leave(self) -> None:
        if self._store is not None:
            self._store.close()


def _key(name: bytes) -> str:
    return f"galley-{name.hex()}"


def _keys(names: Seq[bytes]) -> list[str]:
    return [_key(name) for name in names]


def _prefix(there: Iterable[bool]) -> int:
    """How many come before the first False."""
    return sum(1 for _ in takewhile(bool, there))


def _succeeded(result: int) -> None:
    if result:
        raise OSError(f"the Mooncake Store cannot be set up here: error {result}")


def _answered(results: list[int]) -> list[int]:
    """`results`, unless one says that the master did not answer: OSError."""
    if any(result in RPC_FAILED for result in results):
        raise OSError(f"the Mooncake master does not answer: error {min(results)}")
    return results
