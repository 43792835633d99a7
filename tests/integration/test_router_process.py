"""The router as a process, with a real nats-server."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from common.messages.cluster import WorkerBeat
from common.messages.subjects import Subjects
from common.runtime.bus import MessageBus
from common.runtime.heartbeat import Heartbeat
from common.transport.nats import NatsTransport
from tests.support.fleet import worker_beat
from tests.support.nats import NatsServer, running_nats
from tests.support.service_process import running_service

MODULE = "services.router"


def arguments(nats: NatsServer) -> list[str]:
    return ["--nats_url", nats.url, "--port", "0", "--cluster", "test", "--instance", "r1"]


@asynccontextmanager
async def beating(nats: NatsServer, *beats: WorkerBeat) -> AsyncIterator[MessageBus]:
    bus = MessageBus(NatsTransport(nats.url, name="workers"), Subjects("test"))
    await bus.connect()
    tasks = [asyncio.create_task(Heartbeat(bus, partial(_same, beat), 0.2).run()) for beat in beats]
    try:
        yield bus
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await bus.close()


async def test_it_shows_the_fleet_and_survives_a_nats_restart() -> None:
    async with running_nats() as nats, running_service(MODULE, *arguments(nats)) as router:
        status, _ = await router.get("/healthz")
        assert status == 200
        assert (await router.get("/readyz"))[0] == 503
        async with beating(nats, worker_beat("p1", "prefill"), worker_beat("d1")):
            await router.until("/readyz", 200)
            await nats.stop()
            await router.until("/readyz", 503)
            await nats.start()
            await router.until("/readyz", 200, timeout_s=5)
            _, body = await router.get("/instances")
            assert isinstance(body, dict)
            assert [(one["instance"], one["role"], one["state"]) for one in body["instances"]] == [
                ("d1", "decode", "alive"),
                ("p1", "prefill", "alive"),
                ("r1", "router", "alive"),
            ]
        assert await router.terminate() == 0


async def test_it_waits_for_a_nats_that_comes_later() -> None:
    nats = NatsServer()
    async with running_service(MODULE, *arguments(nats)) as router:
        _, body = await router.get("/readyz")
        assert isinstance(body, dict)
        assert body["reason"] == "not connected to NATS"
        try:
            await nats.start()
            async with beating(nats, worker_beat("p1", "prefill"), worker_beat("d1")):
                await router.until("/readyz", 200, timeout_s=5)
        finally:
            await nats.stop()


async def test_it_stops_while_nats_is_away() -> None:
    async with running_service(MODULE, *arguments(NatsServer())) as router:
        assert await router.terminate() == 0


def _same(beat: WorkerBeat) -> WorkerBeat:
    return beat
