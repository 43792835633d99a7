"""`python -m bench.fake.worker`: a fleet of echoing decode workers in one process, with real NATS.

Each has its own connection, engine, scheduler and beats, as a decode process has. `POST /pace` {step_ms} sets
the time of a step; `GET /times` tells and forgets when each request's job came and each of its tokens was
emitted, by the wall clock, which the load client on the same machine reads too.
"""

import asyncio
import sys
import time
from collections.abc import Sequence as Seq
from contextlib import AsyncExitStack

import orjson
from aiohttp import web
from pydantic import Field

from bench.fake.echo import EchoRunner, Pace
from common.config import DecodeSettings, load
from common.engine.scheduler import StepOutput
from common.ids import Incarnation, InstanceId, InstanceRef, RequestId
from common.kv.block_pool import BlockPool
from common.messages.generation import Job, Refused
from common.messages.subjects import Subjects
from common.observability.http import add_probes, json_response, serve_http
from common.observability.metrics import WorkerMetrics
from common.runtime.bus import MessageBus
from common.runtime.host import Parts, WorkerHost
from common.runtime.service import ServiceContext, run_service
from common.runtime.worker import Worker
from common.transport.inproc import InprocHub
from common.transport.nats import NatsTransport
from services.decode.service import DecodeService

MAX_MODEL_LEN = 8192


class FakeFleetSettings(DecodeSettings):
    """A decode worker's settings, for each of `workers`."""

    workers: int = Field(default=8, ge=1, le=64, description="workers in this process")
    step_ms: float = Field(default=20.0, gt=0, description="time of a step, in ms")


class Times:
    """Wall-clock seconds per request: first when its job came, then when each token's frame was made."""

    def __init__(self) -> None:
        self._of: dict[RequestId, list[float]] = {}

    def came(self, request: RequestId) -> None:
        self._of[request] = [time.time()]

    def emitted(self, outputs: Seq[StepOutput]) -> None:
        now = time.time()
        for output in outputs:
            if (times := self._of.get(output.seq.key.request)) is not None:  # none is left of what was taken
                times.append(now)

    def take(self) -> dict[RequestId, list[float]]:
        taken, self._of = self._of, {}
        return taken


class TimedDecode(DecodeService):
    """A decode service that writes down when things happen."""

    def __init__(self, parts: Parts, worker: Worker, pool: BlockPool, times: Times) -> None:
        super().__init__(parts, worker, pool)
        self._times = times

    def submit(self, job: Job) -> Refused | None:
        self._times.came(job.key.request)
        return super().submit(job)

    def stepped(self, outputs: Seq[StepOutput]) -> None:
        asyncio.get_running_loop().call_soon(self._times.emitted, outputs)  # just before the frame is made
        super().stepped(outputs)


class Fleet:
    """The workers of this process. `run` serves until told to stop."""

    def __init__(self, settings: FakeFleetSettings, context: ServiceContext) -> None:
        self.metrics = WorkerMetrics(settings.instance, settings.role)
        self.http_url = ""
        self._settings = settings
        self._context = context
        self._times = Times()
        self._paces: list[Pace] = []
        self._hosts: list[WorkerHost] = []

    def why_not_ready(self) -> str:
        all_ready = len(self._hosts) == self._settings.workers and all(host.ready for host in self._hosts)
        return "" if all_ready else "not taking jobs"

    async def set_pace(self, request: web.Request) -> web.Response:
        step_ms = float(orjson.loads(await request.read())["step_ms"])
        for pace in self._paces:
            pace.step_s = step_ms / 1e3
        return json_response({"step_ms": step_ms})

    async def tell_times(self, _: web.Request) -> web.Response:
        return json_response(self._times.take())

    async def run(self) -> None:
        async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
            for number in range(self._settings.workers):
                name = InstanceId(f"{self._settings.instance}-{number}")
                bus = MessageBus(
                    NatsTransport(self._settings.nats_url, name=name), Subjects(self._settings.cluster)
                )
                stack.push_async_callback(bus.close)
                if not await bus.connect(self._context.stopping):
                    return
                host = self._host(name, bus)
                self._hosts.append(host)
                tasks.create_task(host.run(self._context.stopping))

    def _host(self, name: InstanceId, bus: MessageBus) -> WorkerHost:
        settings, context = self._settings, self._context
        runner = EchoRunner(
            MAX_MODEL_LEN, settings.max_num_seqs * MAX_MODEL_LEN // EchoRunner.layout.block_size
        )
        pace = Pace(runner, settings.step_ms / 1e3, len(self._paces) / settings.workers)
        self._paces.append(pace)
        parts = Parts(
            ref=InstanceRef(name, Incarnation(context.ids.hex())),
            settings=settings,
            clock=context.clock,
            ids=context.ids,
            bus=bus,
            runner=runner,
            executor=pace,
            transport=InprocHub().transport(),
            metrics=WorkerMetrics(name, settings.role),
            http_url=self.http_url,
        )
        return WorkerHost(parts, lambda parts, worker, pool: TimedDecode(parts, worker, pool, self._times))


async def serve(settings: FakeFleetSettings, context: ServiceContext) -> None:
    fleet = Fleet(settings, context)
    app = web.Application()
    app.add_routes([web.post("/pace", fleet.set_pace), web.get("/times", fleet.tell_times)])
    add_probes(app, fleet.metrics, fleet.why_not_ready)
    http = await serve_http(app, settings.host, settings.port)
    try:
        fleet.http_url = http.url(settings.reachable_host)
        context.announce(fleet.http_url)
        await fleet.run()
    finally:
        await http.close()


def main() -> None:
    settings = load(FakeFleetSettings, sys.argv[1:])
    run_service(settings, lambda context: serve(settings, context))


if __name__ == "__main__":
    main()
