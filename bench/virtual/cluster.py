"""Router, workers and gateway as they are deployed, in one process and in virtual time.

Only the edges are replaced: the model by FakeModel (whose tokens depend on every byte of KV), NATS and UCX by
their in-process transports. Used under `run_virtual` (loop.py). Knows nothing of who asks and why.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from common.clock import LoopClock
from common.config import EngineSettings, GatewaySettings, RouterSettings
from common.engine.executor import FakeExecutor
from common.engine.runner import BatchPlan
from common.engine.runner_fake import FakeModel, FakeRunner
from common.ids import Incarnation, InstanceId, InstanceRef, SeededIds
from common.kv.pool.base import KVPool
from common.messages.generation import SLO, SamplingParams
from common.messages.subjects import Subjects
from common.observability.metrics import GatewayMetrics, RouterMetrics, WorkerMetrics
from common.runtime.bus import MessageBus
from common.runtime.host import Parts, WorkerHost
from common.transport.inproc import InprocHub
from common.transport.memory import Fate, MemoryHub, MemoryTransport, at_once
from services.decode.service import DecodeService
from services.gateway.gateway import Gateway
from services.gateway.reply import Reply
from services.gateway.request import ChoiceSpec, Generation
from services.gateway.tokenizing import NEXT_MESSAGE, ChatStyle, Vocabulary
from services.prefill.service import PrefillService
from services.router.service import RouterService

READY_S = 1.0
"""Virtual time that a router listens before it answers, and some more."""


class NumberTokenizer:
    """Token 7 reads "7 ": enough of a Tokenizer for a gateway that is given token ids."""

    special_ids: frozenset[int] = frozenset()

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:  # noqa: ARG002
        return [int(word) for word in text.split()]

    def encode_chat(
        self, messages: Sequence[dict[str, object]], style: ChatStyle = NEXT_MESSAGE
    ) -> list[int]:
        raise NotImplementedError

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(f"{i} " for i in ids)

    def spell(self, ids: Sequence[int]) -> str:
        return self.decode(ids)

    def bytes_of(self, token: int) -> bytes:
        return f"{token} ".encode()

    def pieces(self, ids: Sequence[int]) -> list[str]:
        return [self.spell([token]) for token in ids]


class VirtualWorker:
    """One worker with its own transports; `kill` is SIGKILL."""

    def __init__(self, cluster: "VirtualCluster", settings: EngineSettings) -> None:
        loop = asyncio.get_running_loop()
        self.ref = InstanceRef(InstanceId(settings.instance), Incarnation(cluster.ids.hex()))
        self.control = cluster.control.client()
        self.transport = cluster.kv.transport()
        self.metrics = WorkerMetrics(settings.instance, settings.role)
        runner = FakeRunner(cluster.model, settings.num_blocks or 256)
        parts = Parts(
            ref=self.ref,
            settings=settings,
            clock=LoopClock(loop),
            ids=cluster.ids,
            bus=cluster.bus(self.control),
            runner=runner,
            executor=FakeExecutor(runner, cluster.step_time),
            transport=self.transport,
            metrics=self.metrics,
            http_url="",
            kv_pool=cluster.kv_pool,
        )
        self.host = WorkerHost(parts, PrefillService if settings.role == "prefill" else DecodeService)
        self.stopping = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    async def run(self) -> None:
        await self.control.connect()
        await self.host.run(self.stopping)

    async def kill(self) -> None:
        """The process is gone from one moment to the next."""
        self.control.kill()
        self.transport.kill()
        assert self.task is not None
        self.task.cancel()
        await asyncio.wait([self.task])


class VirtualCluster:
    """`started` starts one router, one gateway and the workers, and waits until they can serve."""

    def __init__(
        self,
        model: FakeModel,
        step_time: Callable[[BatchPlan], float],
        *,
        router: RouterSettings,
        gateway: GatewaySettings,
        fate: Fate = at_once,
        kv_pool: KVPool | None = None,
        seed: int = 1,
    ) -> None:
        """`step_time` is what a step of a worker takes, in seconds; `fate` what the bus does to messages."""
        self.model = model
        self.step_time = step_time
        self.ids = SeededIds(seed)
        self.control = MemoryHub(fate)
        self.kv = InprocHub()
        self.kv_pool = kv_pool
        self.workers: dict[str, VirtualWorker] = {}
        self._router_settings = router
        self._gateway_settings = gateway
        self.router: RouterService
        self.gateway: Gateway

    def bus(self, client: MemoryTransport) -> MessageBus:
        return MessageBus(client, Subjects("sim"), self.ids)

    @asynccontextmanager
    async def started(self, workers: Sequence[EngineSettings]) -> AsyncIterator[None]:
        """All of it from here to the block's end, then stopped in order."""
        stopping = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            router = tasks.create_task(self._run_router(stopping))
            for settings in workers:
                self.start(tasks, settings)
            gateway = tasks.create_task(self._run_gateway())
            await asyncio.sleep(READY_S)
            assert self.gateway.why_not_ready() == ""
            yield
            for worker in self.workers.values():
                worker.stopping.set()
            stopping.set()
            await router
            gateway.cancel()

    def make_router(self, name: str, client: MemoryTransport) -> RouterService:
        return RouterService(
            bus=self.bus(client),
            clock=LoopClock(asyncio.get_running_loop()),
            settings=self._router_settings,
            ref=InstanceRef(InstanceId(name), Incarnation(self.ids.hex())),
            metrics=RouterMetrics(name),
        )

    def start(self, tasks: asyncio.TaskGroup, settings: EngineSettings) -> VirtualWorker:
        worker = self.workers[settings.instance] = VirtualWorker(self, settings)
        worker.task = tasks.create_task(worker.run())
        return worker

    def submit(
        self, prompt: Sequence[int], sampling: SamplingParams, *, priority: int = 0, slo: SLO | None = None
    ) -> Reply:
        """Begin one request; the reply is to be closed. Raises GalleyError."""
        choice = ChoiceSpec(0, tuple(prompt), sampling)
        request = Generation(self.gateway.new_request_id(), (choice,), priority=priority, slo=slo)
        return self.gateway.submit(request)

    async def ask(
        self, prompt: Sequence[int], sampling: SamplingParams, *, priority: int = 0, slo: SLO | None = None
    ) -> list[int]:
        """The output tokens of one request. Raises its error."""
        tokens: list[int] = []
        reply = self.submit(prompt, sampling, priority=priority, slo=slo)
        try:
            async for batch in reply:
                tokens += [token.id for delta in batch for token in delta.tokens]
        finally:
            reply.close()
        return tokens

    async def _run_router(self, stopping: asyncio.Event) -> None:
        client = self.control.client()
        await client.connect()
        self.router = self.make_router("router-0", client)
        await self.router.run(stopping)

    async def _run_gateway(self) -> None:
        client = self.control.client()
        await client.connect()
        model = self.model
        self.gateway = Gateway(
            ref=InstanceRef(InstanceId(f"gateway-{self.ids.hex(4)}"), Incarnation(self.ids.hex())),
            bus=self.bus(client),
            clock=LoopClock(asyncio.get_running_loop()),
            ids=self.ids,
            vocabulary=Vocabulary(
                NumberTokenizer(model.vocab_size),
                frozenset(model.eos_token_ids),
                model.max_model_len,
                "fake",
            ),
            settings=self._gateway_settings,
            metrics=GatewayMetrics("gateway-0"),
        )
        await self.gateway.run()
