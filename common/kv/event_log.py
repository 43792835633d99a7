"""What a worker tells of its prefix cache: numbered changes, and snapshots for who has missed some.

Pure: turns what the pool has noted into messages of bounded size. Knows nothing of when they are sent and to
whom.
"""

from common.ids import InstanceRef
from common.kv.block_pool import BlockPool
from common.messages.block_hash import pack
from common.messages.cluster import KVEvents, KVSnapshot


class CacheEventLog:
    """The events of one worker incarnation about `pool`, whose changes nobody else may take."""

    def __init__(self, pool: BlockPool, me: InstanceRef) -> None:
        self._pool = pool
        self._me = me
        self._snapshots = 0
        self.last = 0
        """Number of the last event made; 0 before the first."""

    def events(self, max_hashes: int) -> list[KVEvents]:
        """All changes since the last call, to be sent in this order; at most `max_hashes` names in each."""
        changes = self._pool.take_changes()
        evicted, stored = changes.evicted, changes.stored
        if 0 < len(evicted) + len(stored) <= max_hashes:
            return [self._event(evicted, stored)]
        # What was evicted goes first: nobody is ever told of more blocks than the pool has.
        return [self._event(evicted=part) for part in _cut(evicted, max_hashes)] + [
            self._event(stored=part) for part in _cut(stored, max_hashes)
        ]

    def snapshot(self, max_hashes: int) -> list[KVSnapshot]:
        """All that the last event left; take `events` first. At least one part, to be sent in this order."""
        self._snapshots += 1
        parts = _cut(self._pool.contents(), max_hashes) or [()]
        return [
            KVSnapshot(self._me, self._snapshots, self.last, index, len(parts), pack(part))
            for index, part in enumerate(parts)
        ]

    def _event(self, evicted: tuple[bytes, ...] = (), stored: tuple[bytes, ...] = ()) -> KVEvents:
        self.last += 1
        return KVEvents(self._me, self.last, pack(evicted), pack(stored))


def _cut(hashes: tuple[bytes, ...], size: int) -> list[tuple[bytes, ...]]:
    return [hashes[start : start + size] for start in range(0, len(hashes), size)]
