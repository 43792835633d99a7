"""A worker's prefix cache made known on the bus: changes once a beat, a snapshot to whoever asks.

Events may be lost like any message: their numbers and the beat's show it, and who has missed one asks for
a snapshot, which all hear. Knows nothing of what is made of it.
"""

from common.ids import InstanceRef
from common.kv.block_pool import BlockPool
from common.kv.event_log import CacheEventLog
from common.messages.block_hash import HASH_BYTES
from common.messages.cluster import KVSnapshotRequest
from common.runtime.bus import BusSubscription, MessageBus, Reply

MAX_HASHES = 8192
"""Blocks named in one message: a quarter of NATS' usual limit, so that no message holds up the others."""
_ENVELOPE_BYTES = 1024


class KVEventPublisher:
    """Tells of `pool` in the name of `me`. Listens between `start` and `stop`."""

    def __init__(self, bus: MessageBus, pool: BlockPool, me: InstanceRef) -> None:
        self._bus = bus
        self._me = me
        self._log = CacheEventLog(pool, me)
        self._asked: BusSubscription | None = None

    async def start(self) -> None:
        subject = self._bus.subjects.control(self._me.instance)
        self._asked = await self._bus.subscribe(subject, self._on_request, KVSnapshotRequest)

    async def stop(self) -> None:
        if self._asked is not None:
            await self._asked.unsubscribe()

    def publish(self) -> int:
        """Send what has changed since the last call, if anything; gives the number of the last event."""
        for event in self._log.events(self._max_hashes):
            self._bus.publish(self._bus.subjects.kv_events, event)
        return self._log.last

    def _on_request(self, request: KVSnapshotRequest, _reply: Reply) -> None:
        if request.incarnation != self._me.incarnation:
            return
        self.publish()
        for part in self._log.snapshot(self._max_hashes):
            self._bus.publish(self._bus.subjects.kv_events, part)

    @property
    def _max_hashes(self) -> int:
        room = self._bus.transport.max_payload - _ENVELOPE_BYTES
        return min(MAX_HASHES, max(1, room // (2 * HASH_BYTES)))
