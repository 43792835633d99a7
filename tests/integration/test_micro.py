"""Discovery on a real NATS server, read by nats-py's own implementation of the convention."""

import asyncio

import nats
import orjson
from nats.micro.service import ServiceInfo, ServicePing, ServiceStats

from common.clock import SystemClock
from common.messages.cluster import RouterBeat, WorkerBeat
from common.messages.subjects import Subjects
from common.runtime.bus import MessageBus
from common.runtime.micro import MicroService
from common.transport.nats import NatsTransport
from tests.support.fleet import info, worker_beat
from tests.support.nats import running_nats


async def test_a_client_of_the_convention_understands_us() -> None:
    async with running_nats() as server:
        bus = MessageBus(NatsTransport(server.url, name="d1"), Subjects("test"))
        await bus.connect()
        beats: asyncio.Queue[WorkerBeat] = asyncio.Queue()
        await bus.subscribe(bus.subjects.beat, lambda beat, _reply: beats.put_nowait(beat), WorkerBeat)
        micro = MicroService(bus, SystemClock(), "test", lambda: info("d1", "decode"))
        await micro.start()
        bus.publish(bus.subjects.beat, worker_beat("d2"))
        bus.publish(bus.subjects.beat, RouterBeat(info("r1", "router")))
        await beats.get()
        await bus.transport.request("$SRV.PING", b"", 5)  # both beats are in now

        client = await nats.connect(server.url)
        ping = ServicePing.from_dict(orjson.loads((await client.request("$SRV.PING")).data))
        assert (ping.name, ping.id, ping.version) == ("galley-decode", "d1-i1", "1.0.0")
        seen = orjson.loads((await client.request("$SRV.INFO.galley-decode")).data)
        about = ServiceInfo.from_dict(seen)
        assert about.type == "io.nats.micro.v1.info_response"
        assert about.metadata["state"] == "ready"
        assert [(one.name, one.subject) for one in about.endpoints] == [("beat", "galley.test.beat")]
        answer = await client.request("$SRV.STATS.galley-decode.d1-i1")
        stats = ServiceStats.from_dict(orjson.loads(answer.data))
        assert [(one.num_requests, one.num_errors) for one in stats.endpoints] == [(2, 1)]
        assert "expected a message of kind" in (stats.endpoints[0].last_error or "")

        await micro.stop()
        await client.close()
        await bus.close()
