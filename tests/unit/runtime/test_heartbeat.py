"""Beats come at their interval, at once when asked for, and at once when the bus is back."""

import asyncio

from common.messages.cluster import WorkerBeat
from common.messages.subjects import Subjects
from common.runtime.bus import MessageBus
from common.runtime.heartbeat import Heartbeat
from common.transport.memory import MemoryHub
from tests.support.fleet import worker_beat
from tests.support.virtual_loop import run_virtual


def test_when_beats_are_sent() -> None:
    async def main() -> list[float]:
        hub = MemoryHub()
        bus = MessageBus(hub.client(), Subjects("test"))
        await bus.connect()
        loop = asyncio.get_running_loop()
        started = loop.time()
        heard: list[float] = []

        def note(_beat: WorkerBeat, _reply: object) -> None:
            heard.append(round(loop.time() - started, 3))

        await bus.subscribe(bus.subjects.beat, note, WorkerBeat)
        heartbeat = Heartbeat(bus, lambda: worker_beat("d1"), 0.2)
        beating = asyncio.create_task(heartbeat.run())
        await asyncio.sleep(0.5)
        heartbeat.beat_soon()
        await asyncio.sleep(0.25)
        hub.stop()
        await asyncio.sleep(1.0)
        hub.start()
        await asyncio.sleep(0.25)
        beating.cancel()
        return heard

    assert run_virtual(main()) == [0.0, 0.2, 0.4, 0.5, 0.7, 1.75, 1.95]
