"""A worker's link to the KV pool: the store, the memory of its blocks, and whether to ask it at the moment.

Loader and publisher share it. Knows nothing of sequences.
"""

from collections.abc import Awaitable, Callable
from collections.abc import Sequence as Seq

import structlog

from common.clock import Clock
from common.errors import KVPoolUnavailable
from common.ids import BlockId
from common.kv.buffer import Buffer, KVBuffer
from common.kv.pool.backoff import Backoff
from common.kv.pool.base import KVPool

_log = structlog.get_logger()


class PoolLink:
    """Calls of a KVPool that never raise what a pool may raise: no answer is 0.

    After a failure the pool is left alone for a while, and every call is 0 at once.
    """

    def __init__(self, store: KVPool, buffer: KVBuffer, clock: Clock) -> None:
        self._store = store
        self._buffer = buffer
        self._backoff = Backoff(clock)

    @property
    def usable(self) -> bool:
        """Whether a call would be tried now."""
        return self._backoff.usable

    async def match(self, names: Seq[bytes]) -> int:
        """How many of the first `names` the pool has."""
        return await self._call(lambda: self._store.match(names))

    async def load(self, names: Seq[bytes], blocks: Seq[BlockId]) -> int:
        """Fill `blocks`; how many of the first were. The caller holds them until this returns or raises."""
        return await self._call(lambda: self._store.load(names, self._memory(blocks)))

    async def publish(self, names: Seq[bytes], blocks: Seq[BlockId]) -> int:
        """How many of the first `blocks` are in the pool now. The caller holds them as for `load`."""
        return await self._call(lambda: self._store.publish(names, self._memory(blocks)))

    def _memory(self, blocks: Seq[BlockId]) -> list[Buffer]:
        return [self._buffer.block(block) for block in blocks]

    async def _call(self, call: Callable[[], Awaitable[int]]) -> int:
        if not self._backoff.usable:
            return 0
        try:
            done = await call()
        except KVPoolUnavailable as error:
            _log.warning("KV pool failed", alone_s=round(self._backoff.failed(), 1), error=error.message)
            return 0
        except Exception:
            # Whatever the library of a store comes up with, it costs a cache and not the worker.
            _log.exception("KV pool failed", alone_s=round(self._backoff.failed(), 1))
            return 0
        self._backoff.succeeded()
        return done
