"""What a worker does with the KV pool, where there is one.

Prefixes are loaded before they would be computed or pulled, and what was computed is published. Knows
sequences and the pool's loader and publisher, not what becomes of a sequence whose prefix is here.
"""

import asyncio
from collections.abc import Callable
from collections.abc import Sequence as Seq

from common.engine.scheduler import Scheduler
from common.engine.sequence import Sequence
from common.ids import AttemptKey, BlockId
from common.kv.pool.link import PoolLink
from common.kv.pool.loader import PrefixLoader
from common.kv.pool.publisher import PoolPublisher
from common.kv.prefix_cache import PrefixCache
from common.runtime.host import Parts
from common.runtime.worker import Worker

PUBLISHING_SHARE = 4
"""One block in so many may wait to be published."""


class PrefixSharing:
    """Without a KV pool every method does as if the pool were empty."""

    def __init__(self, parts: Parts, worker: Worker, scheduler: Scheduler) -> None:
        settings, pool = parts.settings, scheduler.pool
        self._worker = worker
        self._prefixes = PrefixCache(pool, parts.fingerprint)
        self._block_size = pool.block_size
        self._fetching: dict[AttemptKey, tuple[Sequence, asyncio.Task[None]]] = {}
        self._loader: PrefixLoader | None = None
        self._publisher: PoolPublisher | None = None
        if parts.kv_pool is None:
            return
        link = PoolLink(parts.kv_pool, parts.runner.buffer, parts.clock)
        parts.metrics.pool_usable(settings.kv_pool).set_function(lambda: link.usable)
        min_blocks = pool.blocks_for(settings.kv_pool_min_tokens)
        # Whoever runs keeps the room to grow; whoever waits for room waits until a load has ended at most.
        self._loader = PrefixLoader(link, pool, min_blocks, lambda: pool.num_free - scheduler.headroom)
        max_blocks = max(1, pool.num_blocks // PUBLISHING_SHARE)
        self._publisher = PoolPublisher(link, pool, max_blocks, parts.metrics.pool_unpublished.inc)

    def __len__(self) -> int:
        """Sequences whose prefix is being loaded."""
        return len(self._fetching)

    @property
    def num_tokens(self) -> int:
        """Tokens of all of them."""
        return sum(len(seq.tokens) for seq, _ in self._fetching.values())

    def fetch(self, seq: Sequence, then: Callable[[], None], *, whole: bool = False) -> None:
        """Call `then` once the pool's part of the prefix of `seq` is in the prefix cache, or not to be had.

        At once where nothing is to be loaded. `whole`: the last token is part of the prefix, as it need not
        be computed here. `then` must not raise.
        """
        names = self._worth_loading(seq, whole)
        if not names:
            then()
            return
        self._fetching[seq.key] = (seq, self._worker.spawn(self._fetch(seq, names, then)))

    def discard(self, key: AttemptKey) -> None:
        """`then` of this attempt is not wanted any more, if it was not called yet. Idempotent."""
        if fetching := self._fetching.pop(key, None):
            fetching[1].cancel()

    def computed(self, seq: Sequence, blocks: Seq[BlockId], offered: int) -> int:
        """Publish those of `blocks`, the table of `seq`, that are full of computed tokens.

        The first `offered` were offered before; returns how many were by now.
        """
        full = seq.num_computed // self._block_size
        if self._publisher is None or full <= offered:
            return offered
        cached = seq.num_cached // self._block_size
        self._publisher.offer(blocks[offered:full], cached - offered)
        return full

    async def run(self) -> None:
        """Publish, until cancelled."""
        if self._publisher is not None:
            await self._publisher.run()

    def _worth_loading(self, seq: Sequence, whole: bool) -> list[bytes]:
        # Who wants the log probabilities of its prompt passes every cache by.
        if self._loader is None or seq.sampling.prompt_logprobs is not None:
            return []
        known = seq.tokens if whole else seq.tokens[:-1]
        names = self._prefixes.names(known, seq.cache_salt, seq.names)
        return names if self._loader.missing(names) else []

    async def _fetch(self, seq: Sequence, names: list[bytes], then: Callable[[], None]) -> None:
        assert self._loader is not None
        await self._loader.load(names)
        del self._fetching[seq.key]
        then()
