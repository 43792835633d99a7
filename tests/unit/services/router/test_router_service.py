"""The router service on the in-memory bus, in virtual time."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import structlog

from common.clock import LoopClock
from common.config import RouterSettings
from common.errors import NoResponders
from common.ids import AttemptKey, InstanceId, RequestId
from common.messages.cluster import GatewayBeat, RouterBeat, WorkerBeat
from common.messages.generation import DecodeRoute, DecodeRouteRequest, Rejected, Route, RouteRequest
from common.messages.subjects import Subjects
from common.observability.metrics import RouterMetrics
from common.runtime.bus import MessageBus
from common.runtime.heartbeat import Heartbeat
from common.transport.memory import MemoryHub
from services.router.service import RouterService
from tests.support.fleet import ref, worker_beat
from tests.support.virtual_loop import run_virtual
from tests.support.waiting import Collector

KEY = AttemptKey(RequestId("r"), 1, 0)
ROUTE = RouteRequest(KEY, InstanceId("g1"), 100, 16)


class Town:
    """A hub, a client on it, and routers and beating workers that the town stops at its end."""

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self.hub = MemoryHub()
        self.bus = MessageBus(self.hub.client(), Subjects("test"))
        self.stopping = asyncio.Event()
        self._tasks = tasks
        self._beating: dict[str, asyncio.Task[None]] = {}

    async def router(self, name: str = "r1", **settings: Any) -> RouterService:
        bus = MessageBus(self.hub.client(), Subjects("test"))
        await bus.connect()
        service = RouterService(
            bus=bus,
            clock=LoopClock(asyncio.get_running_loop()),
            settings=RouterSettings(instance=name, **settings),
            ref=ref(name),
            metrics=RouterMetrics(name),
        )
        self._tasks.create_task(service.run(self.stopping))
        return service

    async def worker(self, beat: WorkerBeat) -> None:
        bus = MessageBus(self.hub.client(), Subjects("test"))
        await bus.connect()
        task = self._tasks.create_task(Heartbeat(bus, lambda: beat, 0.2).run())
        self._beating[beat.info.ref.instance] = task

    def silence(self, name: str) -> None:
        self._beating[name].cancel()

    async def route(self) -> Route | Rejected:
        return await self.bus.request(self.bus.subjects.route, ROUTE, Route, Rejected, timeout_s=1)

    def end(self) -> None:
        self.stopping.set()
        for task in self._beating.values():
            task.cancel()


def in_town(story: Callable[[Town], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            town = Town(tasks)
            await town.bus.connect()
            await story(town)
            town.end()

    run_virtual(main(), limit_s=120)


def test_a_fleet_is_found_and_routed_to() -> None:
    async def story(town: Town) -> None:
        router = await town.router()
        for beat in (worker_beat("p1", "prefill"), worker_beat("d1")):
            await town.worker(beat)
        assert router.why_not_ready() == "listening for instances"
        with pytest.raises(NoResponders):
            await town.route()
        await asyncio.sleep(1)
        assert router.why_not_ready() == ""
        assert await town.route() == Route(ref("p1"), ref("d1"))
        question = DecodeRouteRequest(KEY, ref("p1"), 100, 16)
        subject = town.bus.subjects.route_decode
        assert await town.bus.request(subject, question, DecodeRoute, timeout_s=1) == DecodeRoute(ref("d1"))
        assert [(one["instance"], one["state"]) for one in router.fleet()] == [
            ("d1", "alive"),
            ("p1", "alive"),
            ("r1", "alive"),
        ]

    in_town(story)


def test_a_silent_worker_gets_nothing_after_six_tenths_of_a_second_unless_all_are_silent() -> None:
    async def story(town: Town) -> None:
        router = await town.router()
        for beat in (worker_beat("p1", "prefill"), worker_beat("d1"), worker_beat("d2")):
            await town.worker(beat)
        await asyncio.sleep(1)
        town.silence("d1")
        await asyncio.sleep(0.8)
        for _ in range(10):
            answer = await town.route()
            assert isinstance(answer, Route)
            assert answer.decode == ref("d2")
        town.silence("d2")
        await asyncio.sleep(0.8)
        assert isinstance(await town.route(), Route)
        await asyncio.sleep(2.4)
        answer = await town.route()
        assert isinstance(answer, Rejected)
        assert answer.reason == "no_decode"
        assert router.why_not_ready() == "no decode instance"

    in_town(story)


def test_it_waits_for_instances_and_finds_those_that_come_later() -> None:
    async def story(town: Town) -> None:
        router = await town.router(topology="chunked")
        await asyncio.sleep(1)
        assert isinstance(await town.route(), Rejected)
        assert router.why_not_ready() == "no decode instance"
        await town.worker(worker_beat("d1"))
        await asyncio.sleep(0.01)
        assert await town.route() == Route(ref("d1"), None)

    in_town(story)


def test_two_routers_share_and_one_alone_goes_on() -> None:
    async def story(town: Town) -> None:
        routers = [await town.router("r1"), await town.router("r2")]
        for beat in (worker_beat("p1", "prefill"), worker_beat("d1")):
            await town.worker(beat)
        await asyncio.sleep(1)
        assert [await town.route() for _ in range(10)] == [Route(ref("p1"), ref("d1"))] * 10
        assert all(one.why_not_ready() == "" for one in routers)

    in_town(story)


def test_a_bus_outage_makes_it_not_ready_and_kills_nobody() -> None:
    async def story(town: Town) -> None:
        router = await town.router()
        for beat in (worker_beat("p1", "prefill"), worker_beat("d1")):
            await town.worker(beat)
        await asyncio.sleep(1)
        town.hub.stop()
        await asyncio.sleep(30)
        assert router.why_not_ready() == "not connected to NATS"
        town.hub.start()
        assert await town.route() == Route(ref("p1"), ref("d1"))
        assert router.why_not_ready() == ""

    in_town(story)


def test_its_beats_say_whether_a_request_could_be_routed() -> None:
    async def story(town: Town) -> None:
        beats: Collector[RouterBeat] = Collector()

        def note(beat: RouterBeat | WorkerBeat | GatewayBeat, _reply: object) -> None:
            if isinstance(beat, RouterBeat):
                beats.add(beat)

        await town.bus.subscribe(town.bus.subjects.beat, note, RouterBeat, WorkerBeat, GatewayBeat)
        router = await town.router()
        await town.worker(worker_beat("p1", "prefill", fingerprint="one"))
        await town.worker(worker_beat("d1", "decode", fingerprint="another"))
        await asyncio.sleep(1)
        assert [beat.info.ready for beat in beats.items][-1] is False
        assert "layout" in router.why_not_ready()
        await town.worker(worker_beat("d2", "decode", fingerprint="one"))
        await asyncio.sleep(0.5)
        assert [beat.info.ready for beat in beats.items][-1] is True
        town.silence("p1")
        await asyncio.sleep(3.5)
        assert [beat.info.ready for beat in beats.items][-1] is False

    in_town(story)


def test_workers_that_cannot_be_paired_are_told_of() -> None:
    async def story(town: Town) -> None:
        await town.router()
        with structlog.testing.capture_logs() as logs:
            await town.worker(worker_beat("p1", "prefill", fingerprint="one"))
            await asyncio.sleep(1)
            await town.worker(worker_beat("d1", "decode", fingerprint="another"))
            await town.worker(worker_beat("d2", "decode", fingerprint="one"))
            await asyncio.sleep(1)
        told = [
            (log["target"], log["fingerprint"], log["others"]) for log in logs if "differ" in log["event"]
        ]
        assert told == [("d1", "another", {"p1": "one"})]

    in_town(story)


def test_it_says_goodbye() -> None:
    async def story(town: Town) -> None:
        beats: Collector[RouterBeat] = Collector()

        def note(beat: RouterBeat | WorkerBeat | GatewayBeat, _reply: object) -> None:
            if isinstance(beat, RouterBeat):
                beats.add(beat)

        await town.bus.subscribe(town.bus.subjects.beat, note, RouterBeat, WorkerBeat, GatewayBeat)
        await town.router(topology="chunked")
        await town.worker(worker_beat("d1", "decode"))
        await asyncio.sleep(1)
        assert [beat.info.ready for beat in beats.items][-1]
        town.stopping.set()
        await asyncio.sleep(0.1)
        last = beats.items[-1].info
        assert last.draining
        assert not last.ready
        with pytest.raises(NoResponders):
            await town.route()

    in_town(story)
