"""A cluster whose workers do what a test says: real bus, real gateway core, scripted answers."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from common.clock import LoopClock
from common.config import GatewaySettings
from common.ids import AttemptKey, Incarnation, InstanceId, InstanceRef, SeededIds
from common.messages.cluster import Beat, GatewayBeat, InstanceInfo, LoadReport, Role, RouterBeat, WorkerBeat
from common.messages.generation import (
    Abort,
    Accepted,
    Job,
    Refused,
    Rejected,
    Route,
    RouteRequest,
    SamplingParams,
)
from common.messages.stream import (
    BoundItem,
    DecodingItem,
    FinishItem,
    FrameItem,
    PrefillStats,
    Resend,
    TokensItem,
)
from common.messages.subjects import Subjects
from common.observability.metrics import GatewayMetrics
from common.runtime.bus import MessageBus, Reply
from common.runtime.outbox import Outbox
from common.transport.memory import Fate, MemoryHub, at_once
from services.gateway.gateway import Gateway
from services.gateway.reply import Reply as GatewayReply
from services.gateway.request import ChoiceSpec, Delta, Generation
from services.gateway.tokenizing import NEXT_MESSAGE, ChatStyle, Vocabulary
from tests.support.faulty import Faults
from tests.support.virtual_loop import run_virtual
from tests.support.waiting import Collector

EOS = 0
SUBJECTS = Subjects("test")


class LetterTokenizer:
    """Token 1 is "a", 2 is "b" and so on; 0 is the special end token."""

    vocab_size = 27
    special_ids = frozenset({EOS})

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(char) - 96 for char in text]

    def encode_chat(
        self, messages: Sequence[dict[str, object]], style: ChatStyle = NEXT_MESSAGE
    ) -> list[int]:
        return [token for message in messages for token in self.encode(str(message["content"]))]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(96 + token) for token in ids if token != EOS)

    def spell(self, ids: Sequence[int]) -> str:
        return "".join("<eos>" if token == EOS else chr(96 + token) for token in ids)

    def bytes_of(self, token: int) -> bytes:
        return b"<eos>" if token == EOS else chr(96 + token).encode()

    def pieces(self, ids: Sequence[int]) -> list[str]:
        return [self.spell([token]) for token in ids]


LETTERS = Vocabulary(LetterTokenizer(), frozenset({EOS}), 1000, "letters")


class ScriptedWorker:
    """Notes the jobs and aborts it gets; `answer` decides what is replied, None is silence."""

    def __init__(self, hub: MemoryHub, name: str, role: Role, incarnation: str = "1") -> None:
        self.ref = InstanceRef(InstanceId(name), Incarnation(incarnation))
        self.jobs: Collector[Job] = Collector()
        self.aborts: Collector[Abort] = Collector()
        self.answer: Callable[[Job], Accepted | Refused | None] = lambda _: Accepted()
        self.answers_aborts = True
        self.acknowledged = 0
        self._info = InstanceInfo(self.ref, role, (1, 1), "", fingerprint="f")
        self._transport = hub.client()
        self._bus = MessageBus(self._transport, SUBJECTS)
        self._outbox = Outbox(self.ref)

    async def run(self) -> None:
        await self._transport.connect()
        name = self.ref.instance
        await self._bus.subscribe(SUBJECTS.job(name), self._on_job, Job)
        await self._bus.subscribe(SUBJECTS.abort(name), self._on_abort, Abort)
        await self._bus.subscribe(SUBJECTS.resend(name), self._on_resend, Resend)
        await self._bus.subscribe(SUBJECTS.beat, self._on_beat, WorkerBeat, GatewayBeat, RouterBeat)
        while True:
            beat = WorkerBeat(self._info, LoadReport(), self._outbox.last_numbers())
            self._bus.publish(SUBJECTS.beat, beat)
            await asyncio.sleep(0.2)

    def kill(self) -> None:
        """The process is gone: nobody listens on its subjects."""
        self._transport.kill()

    def hang(self) -> None:
        """Alive for the bus, but silent."""
        self._bus.publish = lambda subject, message: None  # type: ignore[method-assign]

    def emit(self, gateway: InstanceId, *items: FrameItem) -> None:
        """Send one frame."""
        for item in items:
            self._outbox.put(gateway, item)
        for _, frame in self._outbox.flush():
            self._bus.publish(SUBJECTS.stream(gateway), frame)

    def tokens(self, job: Job, index: int, *ids: int, key: AttemptKey | None = None) -> None:
        self.emit(job.gateway, TokensItem(key or job.key, index, ids))

    def _on_job(self, job: Job, reply: Reply) -> None:
        answer = self.answer(job)
        self.jobs.add(job)
        if answer is not None:
            reply(answer)

    def _on_abort(self, abort: Abort, reply: Reply) -> None:
        self.aborts.add(abort)
        if self.answers_aborts:
            reply(Accepted())

    def _on_resend(self, resend: Resend, _: Reply) -> None:
        for frame in self._outbox.kept(resend.gateway, resend.numbers):
            self._bus.publish(SUBJECTS.stream(resend.gateway), frame)

    def _on_beat(self, beat: Beat, _: Reply) -> None:
        if isinstance(beat, GatewayBeat):
            for ref, number in beat.received:
                if ref == self.ref:
                    self.acknowledged = number
                    self._outbox.acknowledge(beat.info.ref.instance, number)


class ScriptedCluster:
    """One gateway, one router that answers with `routes` one after another (the last one again and again)."""

    def __init__(self, fate: Fate, settings: GatewaySettings, vocabulary: Vocabulary) -> None:
        loop = asyncio.get_running_loop()
        self.hub = MemoryHub(fate)
        self.workers: dict[str, ScriptedWorker] = {}
        self.routes: list[Route | Rejected] = []
        self.router_ready = True
        self.asked: Collector[RouteRequest] = Collector()
        self.loop = loop
        self._peers: list[asyncio.Task[None]] = []
        self.metrics = GatewayMetrics("gw")
        self._transport = self.hub.client()
        self._router_bus = MessageBus(self.hub.client(), SUBJECTS)
        self.gateway = Gateway(
            ref=InstanceRef(InstanceId("gw"), Incarnation("g1")),
            bus=MessageBus(self._transport, SUBJECTS),
            clock=LoopClock(loop),
            ids=SeededIds(1),
            vocabulary=vocabulary,
            settings=settings,
            metrics=self.metrics,
        )

    def worker(self, name: str, role: Role, incarnation: str = "1") -> ScriptedWorker:
        worker = self.workers[name] = ScriptedWorker(self.hub, name, role, incarnation)
        self._peers.append(self._tasks.create_task(worker.run()))
        return worker

    async def route(self) -> None:
        """Be the router."""

        def answer(request: RouteRequest, reply: Reply) -> None:
            self.asked.add(request)
            reply(self.routes.pop(0) if len(self.routes) > 1 else self.routes[0])

        await self._router_bus.transport.connect()
        await self._router_bus.subscribe(SUBJECTS.route, answer, RouteRequest, queue=SUBJECTS.routers)
        info = InstanceInfo(InstanceRef(InstanceId("r"), Incarnation("1")), "router", (1, 1), "")
        while True:
            beat = RouterBeat(replace(info, ready=self.router_ready))
            self._router_bus.publish(SUBJECTS.beat, beat)
            await asyncio.sleep(0.2)

    def _unheard(self, *workers: ScriptedWorker) -> bool:
        """Whether somebody has not beaten yet."""
        seen = [self.gateway.view.get(worker.ref) for worker in workers]
        return bool(self.gateway.why_not_ready()) or None in seen

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        stopping = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            await self._transport.connect()
            self.serving = tasks.create_task(self.gateway.run(stopping))
            self._peers.append(tasks.create_task(self.route()))
            p, d = self.worker("p", "prefill"), self.worker("d", "decode")
            self.routes = [Route(p.ref, d.ref)]
            async with asyncio.timeout(10):
                while self._unheard(p, d):  # noqa: ASYNC110 (beats wake nobody)
                    await asyncio.sleep(0.01)
            yield
            assert self.gateway.num_in_flight == 0
            stopping.set()
            await asyncio.wait([self.serving])
            for peer in self._peers:
                peer.cancel()


@asynccontextmanager
async def cluster(
    fate: Fate = at_once, settings: GatewaySettings | None = None, vocabulary: Vocabulary = LETTERS
) -> AsyncIterator[ScriptedCluster]:
    """A running cluster of prefill "p", decode "d", a router and a gateway."""
    made = ScriptedCluster(fate, settings or GatewaySettings(), vocabulary)
    async with made.running():
        yield made


def generation(
    cluster: ScriptedCluster,
    *,
    n: int = 1,
    max_tokens: int = 20,
    stop: tuple[str, ...] = (),
    **sampling: Any,
) -> Generation:
    """`n` choices of the prompt "abc"; `sampling` are fields of SamplingParams."""
    params = SamplingParams(max_tokens, 7, **sampling)
    spec = ChoiceSpec(0, (1, 2, 3), params)
    return Generation(cluster.gateway.new_request_id(), (spec,) * n, stop)


async def read(reply: GatewayReply, seen: list[Delta] | None = None) -> list[Delta]:
    """Everything until the end, added to `seen`; raises what ended it."""
    seen = [] if seen is None else seen
    async for batch in reply:
        seen += batch
    return seen


def text_of(deltas: list[Delta], choice: int = 0) -> str:
    """All text of one choice."""
    return "".join(delta.text for delta in deltas if delta.choice == choice)


def reasons(deltas: list[Delta], choice: int = 0) -> list[str]:
    """Every finish reason that one choice was given."""
    return [delta.finish for delta in deltas if delta.choice == choice and delta.finish]


Story = Callable[[ScriptedCluster], Awaitable[None]]


def play(story: Story, *, faults: Faults | None = None, settings: GatewaySettings | None = None) -> None:
    """Run `story` against a running cluster in virtual time."""

    async def main() -> None:
        async with cluster(faults or Faults(), settings) as made:
            await story(made)

    run_virtual(main(), limit_s=300)


def bind(prefill: ScriptedWorker, job: Job, decode: ScriptedWorker) -> None:
    """What a prefill sends: bound, and the first token, "a"."""
    prefill.emit(job.gateway, BoundItem(job.key, decode.ref))
    prefill.emit(job.gateway, TokensItem(job.key, 0, (1,), prefill=PrefillStats(2, 1.0, 2.0)))


def go_on(decode: ScriptedWorker, job: Job, *ids: int, index: int = 1, reason: str | None = "length") -> None:
    """What a decode sends: decoding, tokens from `index`, and the finish."""
    items: list[FrameItem] = [DecodingItem(job.key, 1.0, 100), TokensItem(job.key, index, ids)]
    if reason is not None:
        stop_token = ids[-1] if reason == "stop" else None
        items.append(FinishItem(job.key, reason, index + len(ids), stop_token))  # type: ignore[arg-type]
    decode.emit(job.gateway, *items)
