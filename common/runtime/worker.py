"""What prefill and decode workers have in common: intake, aborts, frames, beats, and noticing who is gone.

A worker is this plus an engine plus a `Duty` that says what a job means. Knows nothing of engines and leases,
and of KV only that its events go out with the beats. Everything runs on one event loop; message handlers
only note things down.
"""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from typing import Protocol

import structlog

from common.clock import Clock
from common.errors import DeadlineExceeded, GalleyError, WorkerFailed
from common.ids import AttemptKey, InstanceId, InstanceRef
from common.messages.cluster import GatewayBeat, InstanceInfo, LoadReport, RouterBeat, WorkerBeat
from common.messages.generation import Abort, AbortReason, Accepted, Job, Refused
from common.messages.stream import FailedItem, FrameItem, Resend
from common.observability.metrics import WorkerMetrics
from common.observability.timeline import Stage
from common.routing.cluster_view import ClusterView
from common.runtime.aborts import abort_until_answered
from common.runtime.attempts import AttemptTable
from common.runtime.bus import MessageBus, Reply
from common.runtime.heartbeat import Heartbeat
from common.runtime.kv_events import KVEventPublisher
from common.runtime.outbox import Outbox

log = structlog.get_logger()

LAST_ABORTS_S = 1.0
"""How long a stopping worker waits for others to answer its aborts; they notice its death otherwise."""


@dataclass(slots=True, eq=False)
class Held:
    """An attempt that this worker holds something for: blocks, a lease, a place in a queue."""

    key: AttemptKey
    gateway: InstanceId
    deadline: float

    @property
    def stage(self) -> Stage:
        """Where it is now, for the gauges."""
        raise NotImplementedError


def labels(key: AttemptKey) -> dict[str, str | int]:
    """How a log line names an attempt."""
    return {"request_id": key.request, "attempt": key.attempt, "choice": key.choice}


class Duty(Protocol):
    """What a worker does with its jobs; all calls are on the event loop and return at once."""

    def submit(self, job: Job) -> Refused | None:
        """Take the job (hold() it) or say why not."""
        ...

    def end(self, held: Held) -> None:
        """Free all that is held for it; the worker has already dropped it. Idempotent."""
        ...

    def load(self) -> LoadReport: ...

    def tick(self) -> None:
        """Called at every beat, for what follows from time or from another instance's state."""
        ...

    def died(self, ref: InstanceRef) -> None:
        """Another incarnation is dead: its leases and endpoints are moot."""
        ...


class Worker:
    """The shared half of a worker. `run` owns all its tasks; `hold`/`drop` keep the table of attempts."""

    def __init__(
        self,
        *,
        bus: MessageBus,
        clock: Clock,
        info: InstanceInfo,
        view: ClusterView,
        metrics: WorkerMetrics,
        beat_s: float,
        kv_events: KVEventPublisher,
    ) -> None:
        self.bus = bus
        self.subjects = bus.subjects
        self.clock = clock
        self.view = view
        self.info = info
        self.metrics = metrics
        self.held: dict[AttemptKey, Held] = {}
        self.attempts = AttemptTable(clock)
        self._beat_s = beat_s
        self._kv_events = kv_events
        self._outbox = Outbox(info.ref)
        bus.on_state(view.on_bus_state)
        bus.report_to(metrics)
        self._flush_due = False
        self._tasks: asyncio.TaskGroup | None = None
        self._emptied = asyncio.Event()
        self._heart: Heartbeat | None = None
        self._aborts: set[asyncio.Task[None]] = set()

    @property
    def me(self) -> InstanceRef:
        return self.info.ref

    # --- attempts ---------------------------------------------------------------------------------

    def refusal(self, key: AttemptKey, meant: InstanceRef) -> Refused | Accepted | None:
        """The answer to a job or handoff that is not to be started; None when it is new and welcome."""
        if meant != self.me:
            return Refused("stale", f"{meant.instance} is now another incarnation")
        match self.attempts.verdict(key):
            case "aborted":
                return Refused("aborted", "the attempt was aborted")
            case "known":
                return Accepted()
        if self.info.draining or not self.info.ready:
            return Refused("draining", f"{self.me.instance} takes no new work")
        return None

    def hold(self, held: Held) -> None:
        self.held[held.key] = held
        self.attempts.remember(held.key, max(0.0, held.deadline - self.clock.now()))

    def count(self, stage: Stage) -> int:
        """How many of the attempts held here are at `stage`."""
        return sum(held.stage == stage for held in self.held.values())

    def drop(self, held: Held) -> None:
        """Nothing is held for the attempt any more. Idempotent."""
        if self.held.get(held.key) is held:
            del self.held[held.key]
            if not self.held:
                self._emptied.set()

    def done(self, held: Held) -> None:
        """The attempt has ended well here: finished, or handed over."""
        self.drop(held)
        self.metrics.requests("ok").inc()

    def fail(self, duty: Duty, held: Held, error: GalleyError) -> None:
        """Give the attempt up and tell its gateway, which may start another one."""
        if self.held.get(held.key) is not held:
            return
        self.drop(held)
        # Offered once more, it is not a repeat of something that works.
        self.attempts.abort(held.key, max(0.0, held.deadline - self.clock.now()))
        duty.end(held)
        self.metrics.requests("error").inc()
        log.warning("attempt failed", **labels(held.key), code=error.code, error=error.message)
        item = FailedItem(held.key, error.code or "error", error.message, error.retryable)
        self.emit(held.gateway, item)

    # --- telling others ---------------------------------------------------------------------------

    def emit(self, gateway: InstanceId, item: FrameItem) -> None:
        """Put an item into the next frame, which leaves at the end of this turn of the event loop."""
        self._outbox.put(gateway, item)
        if not self._flush_due:
            self._flush_due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_due = False
        for gateway, frame in self._outbox.flush():
            self.bus.publish(self.subjects.stream(gateway), frame)

    def abort_elsewhere(self, target: InstanceRef, abort: Abort) -> None:
        task = self.spawn(abort_until_answered(self.bus, self.view, self.clock, target, abort))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    def spawn(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        """Run `work` as long as the worker runs. It must not raise: an error ends the worker."""
        if self._tasks is None:
            raise RuntimeError("the worker is not running")
        return self._tasks.create_task(work)

    # --- life -------------------------------------------------------------------------------------

    async def run(self, duty: Duty, stopping: asyncio.Event) -> None:
        """Serve until `stopping` is set; the caller drains first. Owns every task of this worker."""
        subs = self.subjects
        name = self.me.instance

        def on_job(job: Job, reply: Reply) -> None:
            reply(self.refusal(job.key, job.worker) or duty.submit(job) or Accepted())

        def on_abort(abort: Abort, reply: Reply) -> None:
            self.attempts.abort(abort.key, abort.time_left_s)
            for held in self._upto(abort.key):
                self._abort(duty, held, abort.reason)
            reply(Accepted())

        def on_resend(resend: Resend, _: Reply) -> None:
            if resend.incarnation == self.me.incarnation:
                for frame in self._outbox.kept(resend.gateway, resend.numbers):
                    self.bus.publish(subs.stream(resend.gateway), frame)

        def on_beat(beat: WorkerBeat | GatewayBeat | RouterBeat, _: Reply) -> None:
            self.view.observe(beat)
            if isinstance(beat, GatewayBeat):
                for ref, number in beat.received:
                    if ref == self.me:
                        self._outbox.acknowledge(beat.info.ref.instance, number)

        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            subscriptions = [
                await self.bus.subscribe(subs.job(name), on_job, Job),
                await self.bus.subscribe(subs.abort(name), on_abort, Abort),
                await self.bus.subscribe(subs.resend(name), on_resend, Resend),
                await self.bus.subscribe(subs.beat, on_beat, WorkerBeat, GatewayBeat, RouterBeat),
            ]
            self._heart = Heartbeat(self.bus, lambda: self._beat(duty), self._beat_s)
            background = [tasks.create_task(self._heart.run()), tasks.create_task(self._watch(duty))]
            await stopping.wait()
            for held in list(self.held.values()):
                self.fail(duty, held, WorkerFailed(f"{name} is stopping"))
            self._flush()
            if self._aborts:
                await asyncio.wait(self._aborts, timeout=LAST_ABORTS_S)
            for task in (*background, *self._aborts):
                task.cancel()
            for subscription in subscriptions:
                await subscription.unsubscribe()
        self._tasks = None

    async def drain(self, timeout_s: float) -> None:
        """Take no new work, say so in the beats, and wait until nothing is held or the time is over."""
        self.info = replace(self.info, draining=True)
        if self._heart:
            self._heart.beat_soon()
        self._emptied.clear()
        if self.held:
            try:
                await asyncio.wait_for(self._emptied.wait(), timeout_s)
            except TimeoutError:
                log.warning("drain timed out", held=len(self.held))

    def _beat(self, duty: Duty) -> WorkerBeat:
        # Events first: who hears the beat has heard them, or knows that some were lost.
        last_kv_event = self._kv_events.publish()
        return WorkerBeat(self.info, duty.load(), self._outbox.last_numbers(), last_kv_event)

    async def _watch(self, duty: Duty) -> None:
        while True:
            await asyncio.sleep(self._beat_s)
            self._notice(duty)
            duty.tick()

    def _notice(self, duty: Duty) -> None:
        """What silence and time have ended since the last beat."""
        now = self.clock.now()
        dead = self.view.deaths(now)
        for ref in dead:
            duty.died(ref)
        lost = {ref.instance for ref in dead} | set(self._outbox.overdue())
        for gateway in lost:
            self._outbox.drop(InstanceId(gateway))
        for held in list(self.held.values()):
            if held.gateway in lost:
                self._leave(duty, held)
            elif now >= held.deadline:
                self.fail(duty, held, DeadlineExceeded("the request's time is over"))

    def _leave(self, duty: Duty, held: Held) -> None:
        """Free what is held for a gateway that seems dead; should it come back, it hears of it."""
        self.attempts.abort(held.key, max(0.0, held.deadline - self.clock.now()))
        self._abort(duty, held, "gateway_dead")
        error = WorkerFailed(f"{self.me.instance} took {held.gateway} for dead")
        self.emit(held.gateway, FailedItem(held.key, error.code, error.message, error.retryable))

    def _abort(self, duty: Duty, held: Held, reason: AbortReason) -> None:
        self.drop(held)
        duty.end(held)
        self.metrics.requests("aborted").inc()
        self.metrics.requests_aborted(reason).inc()

    def _upto(self, key: AttemptKey) -> list[Held]:
        """What is held for this attempt and earlier ones of its (request, choice)."""
        return [
            held
            for held in self.held.values()
            if held.key.request == key.request
            and held.key.choice == key.choice
            and held.key.attempt <= key.attempt
        ]
