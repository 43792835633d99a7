"""A worker put together: engine, scheduler, pool, and the shared half of every worker, around one duty.

The same assembly serves a real process (runtime/worker_process.py) and a simulated one in a test: it is given
its runner, executor, transports and clock. Knows nothing of sockets, torch and settings files.
"""

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from common.clock import Clock
from common.config import EngineSettings
from common.engine.engine import Engine, EngineSink
from common.engine.ordering import make_ordering
from common.engine.policy import make_policy
from common.engine.prefill_rate import PrefillRate
from common.engine.runner import ModelRunner, StepExecutor
from common.engine.scheduler import Scheduler
from common.ids import IdSource, InstanceRef
from common.kv.block_pool import BlockPool
from common.kv.pool.base import KVPool
from common.kv.prefix_cache import PrefixCache
from common.messages.cluster import MESSAGE_VERSION, InstanceInfo
from common.observability.metrics import WorkerMetrics
from common.routing.cluster_view import ClusterView
from common.runtime.bus import MessageBus
from common.runtime.kv_events import KVEventPublisher
from common.runtime.micro import MicroService
from common.runtime.worker import Duty, Worker
from common.transport.kv import KVTransport


class HostedDuty(Duty, EngineSink, Protocol):
    """What a service brings: a duty that is also its engine's sink."""

    def attach(self, engine: Engine) -> None:
        """Before the first job."""
        ...

    async def start(self) -> None:
        """Listen for what the duty alone hears; before the worker says that it is ready."""
        ...

    async def run(self) -> None:
        """What the duty does in the background, until cancelled."""
        ...

    async def close(self) -> None:
        """Let go of endpoints and leases; nothing is held for anybody any more."""
        ...


@dataclass(frozen=True, slots=True)
class Parts:
    """What a worker is made of. `fingerprint` covers KV layout and weights, `kv_gbps` is the self-test's.

    `saturation` is how many tokens a prefill step needs (engine/saturation.py), if that bounds its steps.
    """

    ref: InstanceRef
    settings: EngineSettings
    clock: Clock
    ids: IdSource
    bus: MessageBus
    runner: ModelRunner
    executor: StepExecutor
    transport: KVTransport
    metrics: WorkerMetrics
    http_url: str
    kv_pool: KVPool | None = None
    kv_gbps: float = 0.0
    saturation: int | None = None

    @property
    def step_tokens(self) -> int:
        """Tokens in one step at most."""
        most = self.settings.max_num_batched_tokens
        return most if self.saturation is None else min(most, self.saturation)

    @property
    def fingerprint(self) -> str:
        return self.runner.layout.fingerprint(self.runner.weights_fingerprint)


MakeDuty = Callable[[Parts, Worker, BlockPool], HostedDuty]


class WorkerHost:
    """Owns everything of one worker from `run` to its end. `ready` once jobs are taken."""

    def __init__(self, parts: Parts, make_duty: MakeDuty) -> None:
        settings, runner = parts.settings, parts.runner
        self._settings = settings
        self.ready = False
        self.pool = BlockPool(runner.buffer.num_blocks, runner.layout.block_size)
        self._kv_events = KVEventPublisher(parts.bus, self.pool, parts.ref)
        self.worker = Worker(
            bus=parts.bus,
            clock=parts.clock,
            info=_info(parts),
            view=ClusterView(parts.clock),
            metrics=parts.metrics,
            beat_s=settings.beat_ms / 1e3,
            kv_events=self._kv_events,
        )
        self.duty = make_duty(parts, self.worker, self.pool)
        rate = PrefillRate()
        scheduler = Scheduler(
            self.pool,
            PrefixCache(self.pool, parts.fingerprint),
            make_policy(settings.policy, settings.chunk_tokens),
            make_ordering(settings.ordering, parts.clock, rate),
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=parts.step_tokens,
            max_model_len=runner.max_model_len,
            eos_token_ids=runner.eos_token_ids,
        )
        self._micro = MicroService(parts.bus, parts.clock, settings.cluster, lambda: self.worker.info)
        self.engine = Engine(scheduler, parts.executor, self.duty, parts.clock, rate)
        self.duty.attach(self.engine)
        _mirror(parts.metrics, self.pool, self.worker)

    async def run(self, stopping: asyncio.Event) -> None:
        """Serve until `stopping`, drain for drain_seconds at most, then end what is left."""
        stop_worker = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.engine.run())
            background = tasks.create_task(self.duty.run())
            await self.duty.start()
            await self._kv_events.start()
            serving = tasks.create_task(self.worker.run(self.duty, stop_worker))
            await self._micro.start()
            self.ready = True
            await stopping.wait()
            self.ready = False
            await self.worker.drain(self._settings.drain_seconds)
            await self._micro.stop()
            stop_worker.set()
            await serving
            await self._kv_events.stop()
            await self.engine.close()
            background.cancel()
            await self.duty.close()


def _info(parts: Parts) -> InstanceInfo:
    runner, settings = parts.runner, parts.settings
    whole_prompts = settings.policy == "prefill_first"
    return InstanceInfo(
        ref=parts.ref,
        role=settings.role,
        versions=(MESSAGE_VERSION, MESSAGE_VERSION),
        http_url=parts.http_url,
        model=settings.model_name,
        fingerprint=parts.fingerprint,
        max_model_len=runner.max_model_len,
        block_size=runner.layout.block_size,
        num_blocks=runner.buffer.num_blocks,
        step_tokens=parts.step_tokens,
        chunk_tokens=0 if whole_prompts else settings.chunk_tokens,
        max_num_seqs=settings.max_num_seqs,
        token_bytes=runner.layout.block_bytes // runner.layout.block_size,
        node=settings.node or socket.gethostname(),
        rack=settings.rack,
        zone=settings.zone,
        kv_gbps=parts.kv_gbps,
    )


def _mirror(metrics: WorkerMetrics, pool: BlockPool, worker: Worker) -> None:
    """Bind the gauges that show live state."""
    metrics.kv_blocks("free").set_function(lambda: pool.num_free - pool.num_cached)
    metrics.kv_blocks("cached").set_function(lambda: pool.num_cached)
    metrics.kv_blocks("used").set_function(lambda: pool.num_used)
    metrics.requests_in_flight.set_function(lambda: len(worker.held))
    metrics.show_stages(worker.count)
