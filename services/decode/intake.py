"""Handoffs on their way into the engine: queued for room, then their KV brought here.

Blocks that the prefix cache has are shared; only the rest is pulled from the prefill's lease. Knows nothing
of what becomes of a handoff that has arrived.
"""

from collections.abc import Callable
from dataclasses import replace

from common.engine.scheduler import Scheduler
from common.engine.sequence import Sequence
from common.errors import GalleyError, KVTransferError
from common.ids import BlockId
from common.kv.importer import KVImporter, PullResult
from common.kv.prefix_cache import PrefixCache
from common.messages.handoff import KVHandoff
from common.runtime.host import Parts
from common.runtime.worker import Worker
from services.decode.decoding import Decoding
from services.decode.handoff_queue import HandoffQueue

Arrived = Callable[[Decoding, PullResult, list[BlockId]], None]
Failed = Callable[[Decoding, GalleyError], None]


class HandoffIntake:
    """Starts pulls, in the engine's order, while the pool has room for them."""

    def __init__(
        self, parts: Parts, worker: Worker, scheduler: Scheduler, arrived: Arrived, failed: Failed
    ) -> None:
        """`arrived` gets the blocks of a handoff whose KV is here, and owns them; `failed` hears why not."""
        settings = parts.settings
        self._worker = worker
        self._scheduler = scheduler
        self._pool = scheduler.pool
        self._layout = parts.runner.layout
        self._max_num_seqs = settings.max_num_seqs
        self._arrived = arrived
        self._failed = failed
        self._prefixes = PrefixCache(self._pool, parts.fingerprint)
        self._waiting: HandoffQueue[Decoding] = HandoffQueue(scheduler.ordering)
        self._pulls: set[Decoding] = set()
        self._importer = KVImporter(
            transport=parts.transport,
            buffer=parts.runner.buffer,
            layout=parts.runner.layout,
            fingerprint=parts.fingerprint,
            me=parts.ref,
            clock=parts.clock,
            kv_timeout_s=settings.kv_timeout_s,
            release=self._pool.release,
            codecs=parts.runner.kv_codecs,
            compression=settings.kv_compression,
        )
        parts.metrics.kv_blocks_quarantined.set_function(lambda: self._importer.num_quarantined)

    def __len__(self) -> int:
        """Handoffs whose KV is not here yet."""
        return len(self._waiting) + len(self._pulls)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens of those that have no room yet."""
        return self._waiting.num_tokens

    def add(self, held: Decoding, seq: Sequence) -> None:
        """Take in the handoff of `held`, which will be `seq`."""
        held.names = self._prefixes.names(seq.tokens, seq.cache_salt, seq.names)
        self._waiting.add(held, seq)
        self.admit()

    def discard(self, held: Decoding) -> None:
        """Let go of what is held for `held` here, if it still is. Idempotent."""
        self._waiting.discard(held)
        if held.pull:
            held.pull.cancel()
            self._pulled(held)
            self._pool.release(held.reserved)  # a pull that has not begun

    def admit(self) -> None:
        """To be called when there may be more room than before."""
        while self._waiting:
            held = self._waiting.next()
            assert held.handoff is not None
            here = self._prefixes.find(held.names)
            if not self._has_room(held.handoff, here):
                return
            self._waiting.admit(held)
            missing = self._layout.blocks_for(held.handoff.num_tokens) - len(here)
            held.reserved = here + self._pool.allocate(missing, here)
            held.pull = self._worker.spawn(self._pull(held, held.handoff, len(here)))
            self._pulls.add(held)

    async def close(self) -> None:
        await self._importer.close()

    def _has_room(self, handoff: KVHandoff, here: list[BlockId]) -> bool:
        """Whether a prompt and its next step fit beside what those who decode or pull will want soon."""
        busy = self._scheduler.num_running + len(self._pulls)
        if busy >= self._max_num_seqs or self._scheduler.num_waiting:
            return False
        soon = self._scheduler.headroom + len(self._pulls)
        missing = self._layout.blocks_for(handoff.num_tokens + 1) - len(here)
        return self._pool.can_allocate(missing + soon, here)

    async def _pull(self, held: Decoding, handoff: KVHandoff, num_here: int) -> None:
        blocks, held.reserved = held.reserved, []  # the importer frees them if it fails
        try:
            left = held.deadline - self._worker.clock.now()
            result = await self._importer.pull(replace(handoff, time_left_s=left), blocks, num_here)
        except KVTransferError as error:
            self._pulled(held)
            self._worker.metrics.kv_transfer_failures.inc()
            self._failed(held, error)
            return
        self._pulled(held)
        self._count(result, handoff, num_here * self._layout.block_size)
        self._arrived(held, result, blocks)

    def _pulled(self, held: Decoding) -> None:
        held.pull = None
        self._pulls.discard(held)

    def _count(self, result: PullResult, handoff: KVHandoff, num_here: int) -> None:
        metrics = self._worker.metrics
        metrics.prefix_cache_query_tokens.inc(handoff.num_tokens)
        metrics.prefix_cache_hit_tokens.inc(num_here)
        metrics.kv_transfer_bytes(result.transport).inc(result.num_bytes)
        metrics.kv_transfer_seconds.observe(result.final.age_s)
        metrics.kv_received_tokens.inc(handoff.num_tokens - num_here)
