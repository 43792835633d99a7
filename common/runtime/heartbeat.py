"""Beats: at a fixed interval, and at once when the bus is back or something worth telling changed.

Knows nothing of what a beat says; the owner makes each one.
"""

import asyncio
from collections.abc import Callable

from common.messages.cluster import Beat
from common.runtime.bus import MessageBus


class Heartbeat:
    """Publishes `make_beat()` on the cluster's beat subject every `interval_s` while `run` runs."""

    def __init__(self, bus: MessageBus, make_beat: Callable[[], Beat], interval_s: float) -> None:
        self._bus = bus
        self._make_beat = make_beat
        self._interval_s = interval_s
        self._due = asyncio.Event()
        bus.on_state(self._on_bus_state)

    def beat_soon(self) -> None:
        """Do not wait out the interval: others should know now."""
        self._due.set()

    async def run(self) -> None:
        """Beat until cancelled."""
        while True:
            self._due.clear()
            self._bus.publish(self._bus.subjects.beat, self._make_beat())
            try:
                async with asyncio.timeout(self._interval_s):
                    await self._due.wait()
            except TimeoutError:
                continue

    def _on_bus_state(self, connected: bool) -> None:
        if connected:
            self.beat_soon()
