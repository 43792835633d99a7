"""A prefill or decode worker as a process: from settings to serving, with the real model, UCX and NATS.

Probes answer first, then model and UCX get ready side by side, then the bus is joined. Knows nothing of what
the duty does with its jobs.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from functools import partial

import structlog
from aiohttp import web

from common import model_files
from common.config import EngineSettings, PrefillSettings
from common.engine.executor import ThreadExecutor
from common.engine.pool_staging import staged
from common.engine.runner_torch import ENGINE_MODES, EngineMode, TorchRunner
from common.engine.saturation import measure_saturation
from common.kv.pool.base import KVPool
from common.kv.pool.open import open_pool
from common.messages.subjects import Subjects
from common.observability.http import add_probes, serve_http
from common.observability.metrics import WorkerMetrics
from common.runtime.bus import MessageBus
from common.runtime.host import MakeDuty, Parts, WorkerHost
from common.runtime.meters import KVPoolMeter
from common.runtime.service import ServiceContext, settle
from common.transport.kv import KVTransport
from common.transport.nats import NatsTransport
from common.transport.ucx import open_ucx

log = structlog.get_logger()

WrapTransport = Callable[[KVTransport], KVTransport]


class _Process:
    """What the probes can see while the worker is being put together."""

    def __init__(self) -> None:
        self.stage = "loading the model"
        self.bus: MessageBus | None = None
        self.host: WorkerHost | None = None
        self.runner: TorchRunner | None = None
        self.mode_is_final = False
        self.kv_pool = ""

    def why_not_ready(self) -> str:
        if self.bus is not None and not self.bus.connected:
            return "the message bus is not connected"
        if self.host is None:
            return self.stage
        return "" if self.host.ready else "not taking jobs"

    def details(self) -> dict[str, str]:
        if self.runner is None:
            return {}
        return {
            "engine_mode": self.runner.mode,
            "engine_mode_final": "yes" if self.mode_is_final else "no",  # benches wait for it
            "kv_pool": self.kv_pool or "none",
        }


async def serve_worker(
    settings: EngineSettings,
    context: ServiceContext,
    make_duty: MakeDuty,
    *,
    wrap_transport: WrapTransport = lambda transport: transport,
) -> None:
    """Run until the process is told to stop. Raises ConfigError for what can never work here."""
    metrics = WorkerMetrics(settings.instance, settings.role)
    process = _Process()
    app = web.Application()
    add_probes(app, metrics, process.why_not_ready, process.details)
    async with AsyncExitStack() as stack:
        http = await serve_http(app, settings.host, settings.port)
        stack.push_async_callback(http.close)
        url = http.url(settings.reachable_host)
        context.announce(url)
        async with asyncio.TaskGroup() as tasks:
            loading = tasks.create_task(_load_aside(settings))
            opening = tasks.create_task(open_ucx(settings, metrics))
        (runner, saturation), ucx = loading.result(), opening.result()
        transport = wrap_transport(ucx)
        stack.push_async_callback(transport.close)
        process.runner, process.kv_pool = runner, settings.kv_pool
        kv_pool = await _open_kv_pool(settings, runner, metrics, stack)
        for mode in ENGINE_MODES:
            metrics.engine_mode(mode).set_function(partial(_is_mode, runner, mode))
        process.stage = "joining the cluster"
        bus = MessageBus(NatsTransport(settings.nats_url, name=settings.instance), Subjects(settings.cluster))
        process.bus = bus
        stack.push_async_callback(bus.close)
        if not await bus.connect(context.stopping):
            return
        parts = Parts(
            ref=context.ref,
            settings=settings,
            clock=context.clock,
            ids=context.ids,
            bus=bus,
            runner=runner,
            executor=ThreadExecutor(runner),
            transport=transport,
            metrics=metrics,
            http_url=url,
            kv_pool=kv_pool,
            kv_gbps=ucx.gbps,
            saturation=saturation,
        )
        process.host = WorkerHost(parts, make_duty)
        await _serve(process, process.host, runner, context.stopping)


async def _open_kv_pool(
    settings: EngineSettings, runner: TorchRunner, metrics: WorkerMetrics, stack: AsyncExitStack
) -> KVPool | None:
    """The pool that is asked for, to be closed with `stack`. Raises ConfigError."""
    if not settings.kv_pool:
        return None
    block_bytes = runner.layout.block_bytes
    pool = await open_pool(
        settings.kv_pool,
        block_bytes,
        KVPoolMeter(metrics, block_bytes),
        timeout_s=settings.kv_pool_timeout_s,
        host=settings.reachable_host,
    )
    stack.push_async_callback(pool.close)
    return staged(pool, runner.buffer, settings.kv_pool_timeout_s)


async def _serve(process: _Process, host: WorkerHost, runner: TorchRunner, stopping: asyncio.Event) -> None:
    """Serve from the first moment on, and have the model compiled beside that."""

    def compile_model() -> None:
        runner.compile()
        process.mode_is_final = True

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(asyncio.to_thread(compile_model))
        try:
            await host.run(stopping)
        finally:
            runner.stop_compiling()


def _is_mode(runner: TorchRunner, mode: EngineMode) -> float:
    return float(runner.mode == mode)


async def _load_aside(settings: EngineSettings) -> tuple[TorchRunner, int | None]:
    """Load in a thread that ends then, and OpenMP's helpers of that thread with it.

    Threads beyond the number of cores make libgomp sleep at every join instead of spinning: a step of two
    threads took 20 ms that takes 6.
    """
    thread = ThreadPoolExecutor(1, thread_name_prefix="load")
    try:
        return await asyncio.get_running_loop().run_in_executor(thread, _load, settings)
    finally:
        thread.shutdown(wait=False)


def _load(settings: EngineSettings) -> tuple[TorchRunner, int | None]:
    """The runner, and how many tokens its prefill steps shall have, where that is to be known."""
    runner = TorchRunner(
        model_files.resolve(settings.model, settings.cache_path),
        dtype=settings.dtype,
        device=settings.device,
        block_size=settings.block_size,
        num_blocks=settings.num_blocks,
        memory_fraction=settings.memory_fraction,
        max_num_seqs=settings.max_num_seqs,
        max_model_len=settings.max_model_len,
        threads=settings.threads,
        cache_dir=settings.cache_path,
        compile_model=settings.compile_model,
        deterministic=settings.deterministic,
    )
    seconds = runner.warm_up()
    saturation = None
    if isinstance(settings, PrefillSettings):
        saturation = settings.prefill_step_tokens or measure_saturation(
            runner, settings.max_num_batched_tokens
        )
    settle()
    log.info("warmed up", seconds=round(seconds, 2), prefill_step_tokens=saturation)
    return runner, saturation
