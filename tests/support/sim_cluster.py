"""A whole cluster in one process and in virtual time: router, workers and gateway as they are deployed.

Only the edges are replaced: the model by FakeModel (whose tokens depend on every byte of KV), NATS and UCX by
their in-process transports. Used under `run_virtual`.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Literal

from common.clock import LoopClock
from common.config import (
    SPLIT,
    DecodeSettings,
    EngineSettings,
    GatewaySettings,
    PrefillSettings,
    RouterSettings,
    Topology,
)
from common.engine.executor import FakeExecutor
from common.engine.runner import BatchPlan
from common.engine.runner_fake import FakeModel, FakeRunner
from common.errors import GalleyError
from common.ids import Incarnation, InstanceId, InstanceRef, SeededIds
from common.messages.generation import SLO, SamplingParams
from common.messages.subjects import Subjects
from common.observability.metrics import GatewayMetrics, RouterMetrics, WorkerMetrics
from common.runtime.bus import MessageBus
from common.runtime.host import Parts, WorkerHost
from common.transport.inproc import InprocHub
from common.transport.memory import MemoryHub, MemoryTransport
from services.decode.service import DecodeService
from services.gateway.gateway import Gateway
from services.gateway.request import ChoiceSpec, Generation
from services.gateway.tokenizing import NEXT_MESSAGE, ChatStyle, Vocabulary
from services.prefill.service import PrefillService
from services.router.service import RouterService
from tests.support.faulty import Faults
from tests.support.leaks import assert_pool_idle
from tests.support.memory_pool import MemoryPool

STEP_S = 0.02
"""What a step takes, whatever is in it, and what each of its tokens adds."""
TOKEN_S = 0.0001


class NumberTokenizer:
    """Token 7 reads "7 ": enough of a Tokenizer for a gateway that is given token ids."""

    special_ids: frozenset[int] = frozenset()

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
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


class SimWorker:
    """One worker with its own transports; `kill` is SIGKILL."""

    def __init__(self, cluster: "SimCluster", settings: EngineSettings) -> None:
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
            executor=FakeExecutor(runner, _step_time),
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


class SimCluster:
    """`running` starts it, waits until it can serve, and checks at the end that nothing is left."""

    def __init__(
        self,
        *,
        prefill: int = 1,
        decode: int = 1,
        topology: Topology = "disaggregated",
        model: FakeModel | None = None,
        num_blocks: int = 256,
        gateway_settings: GatewaySettings | None = None,
        ordering: Literal["fcfs", "shortest_first", "slack", "priority"] = "fcfs",
        drain_seconds: float = 0,
        kv_pool: MemoryPool | None = None,
        seed: int = 1,
    ) -> None:
        self.ids = SeededIds(seed)
        self.faults = Faults()
        self.control = MemoryHub(self.faults)
        self.kv = InprocHub()
        self.kv_pool = kv_pool or (MemoryPool() if topology == "pooled" else None)
        self.model = model or FakeModel()
        self.workers: dict[str, SimWorker] = {}
        self._gateway_settings = gateway_settings or GatewaySettings()
        self._topology = topology
        self._ordering = ordering
        self._counts = (prefill if topology in SPLIT else 0, decode)
        self._num_blocks = num_blocks
        self._drain_seconds = drain_seconds
        self.router: RouterService
        self.pools: dict[str, int] = {}
        """Blocks of single workers that differ from `num_blocks`."""
        self.gateway: Gateway

    def bus(self, client: MemoryTransport) -> MessageBus:
        return MessageBus(client, Subjects("sim"), self.ids)

    def settings(self, role: type[EngineSettings], instance: str) -> EngineSettings:
        return role(
            instance=instance,
            num_blocks=self.pools.get(instance, self._num_blocks),
            chunk_tokens=64,
            max_num_batched_tokens=256,
            policy="prefill_first" if self._topology == "colocated" else "decode_first",
            ordering=self._ordering,
            drain_seconds=self._drain_seconds,
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator["SimCluster"]:
        stopping = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            router = tasks.create_task(self._router(stopping))
            prefills, decodes = self._counts
            for number in range(prefills):
                self.start(tasks, self.settings(PrefillSettings, f"prefill-{number}"))
            for number in range(decodes):
                self.start(tasks, self.settings(DecodeSettings, f"decode-{number}"))
            gateway = tasks.create_task(self._gateway())
            await asyncio.sleep(1.0)
            assert self.gateway.why_not_ready() == ""
            yield self
            await asyncio.sleep(2.0)
            self.assert_idle()
            for worker in self.workers.values():
                worker.stopping.set()
            stopping.set()
            await router
            gateway.cancel()

    def make_router(self, name: str, client: MemoryTransport) -> RouterService:
        return RouterService(
            bus=self.bus(client),
            clock=LoopClock(asyncio.get_running_loop()),
            settings=RouterSettings(topology=self._topology),
            ref=InstanceRef(InstanceId(name), Incarnation(self.ids.hex())),
            metrics=RouterMetrics(name),
        )

    def start(self, tasks: asyncio.TaskGroup, settings: EngineSettings) -> SimWorker:
        worker = self.workers[settings.instance] = SimWorker(self, settings)
        worker.task = tasks.create_task(worker.run())
        return worker

    async def kill(self, name: str) -> None:
        await self.workers.pop(name).kill()

    async def ask(
        self, prompt: Sequence[int], sampling: SamplingParams, *, priority: int = 0, slo: SLO | None = None
    ) -> list[int]:
        """The output tokens of one request, or its error."""
        tokens: list[int] = []
        choice = ChoiceSpec(0, tuple(prompt), sampling)
        request = Generation(self.gateway.new_request_id(), (choice,), priority=priority, slo=slo)
        reply = self.gateway.submit(request)
        try:
            async for batch in reply:
                tokens += [token.id for delta in batch for token in delta.tokens]
        finally:
            reply.close()
        return tokens

    async def ask_all(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams
    ) -> list[list[int] | GalleyError]:
        """All at once; an error stands in the place of its answer."""
        answers = await asyncio.gather(
            *(self.ask(prompt, sampling) for prompt in prompts), return_exceptions=True
        )
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, GalleyError):
                raise answer
        return answers  # type: ignore[return-value]

    def assert_idle(self) -> None:
        """Nobody holds anything for any request any more."""
        assert self.gateway.num_in_flight == 0
        for worker in self.workers.values():
            assert not worker.host.worker.held, worker.ref
            assert worker.host.engine.scheduler.is_empty
            assert_pool_idle(worker.host.pool)

    async def _router(self, stopping: asyncio.Event) -> None:
        client = self.control.client()
        await client.connect()
        self.router = self.make_router("router-0", client)
        await self.router.run(stopping)

    async def _gateway(self) -> None:
        client = self.control.client()
        await client.connect()
        self.gateway = Gateway(
            ref=InstanceRef(InstanceId(f"gateway-{self.ids.hex(4)}"), Incarnation(self.ids.hex())),
            bus=self.bus(client),
            clock=LoopClock(asyncio.get_running_loop()),
            ids=self.ids,
            vocabulary=Vocabulary(
                NumberTokenizer(self.model.vocab_size),
                frozenset(self.model.eos_token_ids),
                self.model.max_model_len,
                "fake",
            ),
            settings=self._gateway_settings,
            metrics=GatewayMetrics("gateway-0"),
        )
        await self.gateway.run()


def _step_time(plan: BatchPlan) -> float:
    return STEP_S + TOKEN_S * plan.num_tokens
