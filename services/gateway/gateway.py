"""The gateway without HTTP: takes generations, gives replies, and knows which workers are alive.

Runs on any event loop, a virtual-time one included, over any MessageBus. Knows nothing of OpenAI's shapes
and of text prompts.
"""

import asyncio
from collections.abc import Coroutine, Iterable
from dataclasses import replace
from functools import partial

import structlog

from common.clock import Clock
from common.config import GatewaySettings
from common.errors import ContextLengthExceeded, NoInstance, Overloaded
from common.ids import IdSource, InstanceId, InstanceRef, RequestId
from common.messages.cluster import MESSAGE_VERSION, Beat, GatewayBeat, InstanceInfo, RouterBeat, WorkerBeat
from common.messages.generation import SLO, Abort
from common.messages.stream import Frame, FrameItem
from common.observability.metrics import GatewayMetrics
from common.observability.timeline import RequestTimeline, Stage
from common.runtime.bus import MessageBus
from common.runtime.bus import Reply as Answer
from common.runtime.heartbeat import Heartbeat
from services.gateway.choice import Envelope
from services.gateway.delivery import Delivery
from services.gateway.dispatch import Dispatcher
from services.gateway.effects import SendAbort
from services.gateway.flow import RequestFlow
from services.gateway.intake import FrameIntake, RecentRequests
from services.gateway.membership import Membership
from services.gateway.owner import RequestOwner
from services.gateway.recording import RequestRecord
from services.gateway.reply import Reply
from services.gateway.request import Generation
from services.gateway.text import ChoiceText, StopMatcher
from services.gateway.tokenizing import Vocabulary

log = structlog.get_logger()

LAST_ERRANDS_S = 1.0
"""What the last aborts get when the gateway stops; workers notice its silence otherwise."""


class Gateway:
    """`run` serves until told to stop and owns all tasks; `submit` starts a request at any time meanwhile.

    `ref.instance` must be unique to this process (see `unique_ref`): frames are numbered per gateway id.
    """

    def __init__(
        self,
        *,
        ref: InstanceRef,
        bus: MessageBus,
        clock: Clock,
        ids: IdSource,
        vocabulary: Vocabulary,
        settings: GatewaySettings,
        metrics: GatewayMetrics,
    ) -> None:
        self.vocabulary = vocabulary
        self.metrics = metrics
        self.ids = ids
        self.draining = False
        self.info = InstanceInfo(
            ref, "gateway", (MESSAGE_VERSION, MESSAGE_VERSION), "", model=vocabulary.model
        )
        self.default_slo = SLO(_seconds(settings.default_ttft_slo_ms), _seconds(settings.default_tpot_slo_ms))
        """Budgets of requests that name none."""
        self._bus = bus
        self._clock = clock
        self._settings = settings
        self._beat_s = settings.beat_ms / 1000
        self._flows: dict[RequestId, RequestFlow] = {}
        self._timers: dict[RequestId, asyncio.TimerHandle] = {}
        self._recent = RecentRequests()
        self._intake = FrameIntake()
        self._delivery = Delivery(self._flows, self._on_stranger)
        self._tasks: asyncio.TaskGroup | None = None
        self._errands: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._members = Membership(bus, clock, ref.instance, self._intake, metrics)
        self.view = self._members.view
        self._dispatcher = Dispatcher(bus, self.view, self._members.liveness, clock, self._spawn)
        bus.report_to(metrics)
        metrics.requests_in_flight.set_function(lambda: len(self._flows))
        metrics.show_stages(self._num_in)

    # --- requests ---------------------------------------------------------------------------------

    def new_request_id(self) -> RequestId:
        return RequestId(self.ids.hex(12))

    def submit(self, generation: Generation) -> Reply:
        """Start a request. Close the reply when it is not read to its end.

        Raises Overloaded, NoInstance (draining, not connected) and ContextLengthExceeded at once.
        """
        self._admit(generation)
        now = self._clock.now()
        envelope = Envelope(
            request=generation.request,
            gateway=self.info.ref.instance,
            arrival=now,
            deadline=now + self._settings.request_timeout_s,
            max_attempts=self._settings.max_attempts,
            eos_ids=self.vocabulary.eos_ids,
            priority=generation.priority,
            cache_salt=generation.cache_salt,
            slo=generation.slo,
        )
        owner = RequestOwner(
            generation.choices,
            envelope,
            first_token_timeout_s=self._settings.first_token_timeout_s,
            clock=self._clock,
        )
        record = RequestRecord(generation, RequestTimeline(now), self.metrics)
        flow = RequestFlow(
            generation,
            owner,
            self._texts(generation),
            record,
            self._dispatcher,
            self._clock,
            retire=self._retire,
            max_unread_bytes=self._settings.max_unread_bytes,
        )
        self._flows[generation.request] = flow
        self.metrics.prompt_tokens.inc(flow.usage.prompt_tokens)
        self._arm(flow)
        flow.start()
        return flow.reply

    @property
    def num_in_flight(self) -> int:
        return len(self._flows)

    def why_not_ready(self) -> str:
        """What a request would have to wait for; "" when one can be served."""
        if self.draining:
            return "draining"
        return self._members.why_not_ready()

    def listens_at(self, http_url: str) -> None:
        """The address that the beats tell."""
        self.info = replace(self.info, http_url=http_url)

    # --- life -------------------------------------------------------------------------------------

    async def run(self, stopping: asyncio.Event | None = None) -> None:
        """Serve until `stopping` is set, or cancelled; the caller drains first. What still runs is ended."""
        stopping = stopping or asyncio.Event()
        subjects = self._bus.subjects
        self._bus.on_state(self._members.on_bus_state)
        heartbeat = Heartbeat(self._bus, self._beat, self._beat_s)
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            frames = await self._bus.subscribe(subjects.stream(self.info.ref.instance), self._on_frame, Frame)
            beats = await self._bus.subscribe(
                subjects.beat, self._on_beat, WorkerBeat, GatewayBeat, RouterBeat
            )
            owned = [tasks.create_task(heartbeat.run()), tasks.create_task(self._watch())]
            try:
                await stopping.wait()
                await self.drain(0.0)
                if self._errands:
                    await asyncio.wait(self._errands, timeout=LAST_ERRANDS_S)
            finally:
                self._end_all()  # also when cancelled: a stream shall say why it ends
                self._tasks = None
                for task in (*owned, *self._errands):
                    task.cancel()
            await frames.unsubscribe()
            await beats.unsubscribe()

    async def drain(self, timeout_s: float) -> None:
        """Take no new requests and wait until none is running, or end what is after `timeout_s`."""
        self.draining = True
        self.info = replace(self.info, draining=True)
        self._idle.clear()
        if self._flows:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._idle.wait()
            except TimeoutError:
                log.warning("drain timed out", requests=len(self._flows))
        self._end_all()

    def _end_all(self) -> None:
        for flow in list(self._flows.values()):
            flow.abort("shutdown", NoInstance("this gateway is shutting down", retry_after_s=1.0))

    # --- what arrives -----------------------------------------------------------------------------

    def _on_frame(self, frame: Frame, _answer: Answer) -> None:
        if self._intake.take(frame):
            self._delivery.take(frame)

    def _on_stranger(self, source: InstanceRef, request: RequestId, items: Iterable[FrameItem]) -> None:
        """A worker generates for a request that is not ours, or not any more."""
        if request not in self._recent:
            for item in items:
                abort = Abort(item.key, self._settings.request_timeout_s, "not_owned")
                self._dispatcher.send_abort(SendAbort(source, abort))

    def _on_beat(self, beat: Beat, _answer: Answer) -> None:
        self._members.on_beat(beat)

    def _beat(self) -> Beat:
        return GatewayBeat(self.info, self._intake.received())

    async def _watch(self) -> None:
        """At every beat: what depends on a dead worker goes on elsewhere, silent ones are asked."""
        while True:
            await asyncio.sleep(self._beat_s)
            for ref in self.view.deaths(self._clock.now()):
                log.warning("instance died", target=ref.instance, incarnation=ref.incarnation)
                for flow in list(self._flows.values()):
                    flow.feed(partial(flow.owner.on_death, ref))
            needed = {ref for flow in self._flows.values() for ref in flow.owner.workers}
            for probe in self._members.liveness.probes(sorted(needed)):
                self._spawn(probe)

    # --- helpers ----------------------------------------------------------------------------------

    def _admit(self, generation: Generation) -> None:
        if self.draining:
            raise NoInstance("this gateway is shutting down", retry_after_s=1.0)
        if not self._bus.connected or self._tasks is None:
            raise NoInstance("the gateway is not connected to the cluster", retry_after_s=1.0)
        if len(self._flows) >= self._settings.max_requests:
            raise Overloaded("too many requests are in flight", retry_after_s=1.0)
        for spec in generation.choices:
            if len(spec.prompt_ids) + spec.sampling.max_tokens > self.vocabulary.max_model_len:
                raise ContextLengthExceeded("prompt and max_tokens are over the model's context")

    def _texts(self, generation: Generation) -> list[ChoiceText]:
        tokenizer = self.vocabulary.tokenizer
        texts = []
        for index, spec in enumerate(generation.choices):
            ending = frozenset(spec.sampling.stop_token_ids)
            if not spec.sampling.ignore_eos:
                ending |= self.vocabulary.eos_ids
            special = tokenizer.special_ids
            matcher = StopMatcher(generation.stop, include=generation.include_stop)
            texts.append(ChoiceText(index, tokenizer.decode, special, ending, matcher))
        return texts

    def _arm(self, flow: RequestFlow) -> None:
        left = max(0.001, flow.owner.next_deadline - self._clock.now())
        request = flow.generation.request
        self._timers[request] = asyncio.get_running_loop().call_later(left, self._on_time, flow)

    def _on_time(self, flow: RequestFlow) -> None:
        flow.time()
        if flow.generation.request in self._flows:
            self._arm(flow)

    def _retire(self, flow: RequestFlow) -> None:
        request = flow.generation.request
        del self._flows[request]
        self._timers.pop(request).cancel()
        self._recent.add(request)
        if not self._flows:
            self._idle.set()

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        if self._tasks is None:
            work.close()
            return
        task = self._tasks.create_task(work)
        self._errands.add(task)
        task.add_done_callback(self._errands.discard)

    def _num_in(self, stage: Stage) -> int:
        return sum(flow.record.stage == stage for flow in self._flows.values())


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


def unique_ref(ref: InstanceRef) -> InstanceRef:
    """A gateway's id on the bus, which no other process ever has: its name and its incarnation."""
    return InstanceRef(InstanceId(f"{ref.instance[:55]}-{ref.incarnation[:8]}"), ref.incarnation)
