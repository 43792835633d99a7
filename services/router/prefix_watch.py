"""Keeps a PrefixIndex up to date from the bus, and asks workers for what it has missed.

Knows nothing of who is alive: its owner passes on the beats of those who are, and drops the dead.
"""

from common.messages.cluster import KVEvents, KVSnapshot, KVSnapshotRequest, WorkerBeat
from common.observability.metrics import RouterMetrics
from common.routing.prefix_index import PrefixIndex
from common.runtime.bus import BusSubscription, MessageBus, Reply


class PrefixWatch:
    """Listens between `start` and `stop`. A snapshot is asked for at every beat until it is there."""

    def __init__(self, bus: MessageBus, index: PrefixIndex, metrics: RouterMetrics) -> None:
        self._bus = bus
        self._index = index
        self._metrics = metrics
        self._events: BusSubscription | None = None
        metrics.prefix_index_blocks.set_function(lambda: index.total_blocks)

    async def start(self) -> None:
        """To be called before the first beat is passed on: the beat tells which events should be here."""
        self._events = await self._bus.subscribe(
            self._bus.subjects.kv_events, self._on_event, KVEvents, KVSnapshot
        )

    async def stop(self) -> None:
        if self._events is not None:
            await self._events.unsubscribe()

    def observe(self, beat: WorkerBeat) -> None:
        info = beat.info
        if self._index.observe(info.ref, info.num_blocks, beat.last_kv_event):
            subject = self._bus.subjects.control(info.ref.instance)
            self._bus.publish(subject, KVSnapshotRequest(info.ref.incarnation))
            self._metrics.prefix_index_snapshots.inc()

    def _on_event(self, event: KVEvents | KVSnapshot, _reply: Reply) -> None:
        if isinstance(event, KVEvents):
            self._index.apply(event)
        else:
            self._index.install(event)
