"""A whole cluster of processes on this machine: started together, watched, stopped together.

    async with LocalCluster(spec, run_dir, watcher) as cluster: the cluster is ready at `cluster.url`

Leaving the block stops everything within STOP_S. Also what benches and tests start. Knows nothing of how
it is shown; a Watcher hears of every change.
"""

import asyncio
import fcntl
import os
import secrets
import signal
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, Self, TextIO

import aiohttp
import orjson

from common.config import ENV_PREFIX, EngineSettings, GatewaySettings, child_environment
from common.errors import ConfigError, GalleyError
from deploy.local import readiness
from deploy.local.join import worker_environment, write_worker_environment
from deploy.local.kv_pool import OwnPool
from deploy.local.processes import ChildProcess
from deploy.local.spec import ClusterSpec, ProcessSpec, plan_processes

STOP_S = 5.0
"""All of a stop: drain, a second signal after DRAIN_S, SIGKILL after KILL_S, and then nats-server."""
DRAIN_S = 3.5
KILL_S = 4.5
START_TIMEOUT_S = 300.0


class ChildDied(GalleyError):
    """A process ended before it was ready, or was not ready in time."""

    code = "child_died"

    def __init__(self, child: ChildProcess, what: str) -> None:
        super().__init__(f"{child.name} {what}")
        self.child = child


class Watcher(Protocol):
    def changed(self, child: ChildProcess) -> None:
        """`child` has reached another state."""
        ...


class LocalCluster:
    """See the module's docstring. `children` are in the order in which they are started.

    `died` are those that had ended when the cluster was told to stop.
    """

    def __init__(
        self,
        spec: ClusterSpec,
        run_dir: Path,
        watcher: Watcher,
        *,
        plans: Sequence[ProcessSpec] = (),
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        """`plans` are the services to start instead of those that `spec` asks for; for tests."""
        self.spec = spec
        self.run_dir = run_dir
        self.children: list[ChildProcess] = []
        self.died: list[str] = []
        self._plans = list(plans) or plan_processes(spec)
        self._watcher = watcher
        self._start_timeout_s = start_timeout_s
        self._lock: TextIO | None = None
        self._kv_pool: OwnPool | None = None

    @property
    def url(self) -> str:
        """Where clients go, once ready."""
        return next(child.address for child in self.children if child.role == "gateway")

    @property
    def gateway_settings(self) -> GatewaySettings:
        settings = self._plans[-1].settings
        assert isinstance(settings, GatewaySettings)
        return settings

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Start everything and wait until all are ready.

        Raises ConfigError before anything is started, ChildDied afterwards; nothing is left running then.
        """
        self.check_ports()
        self.run_dir, self._lock = claim_run_dir(self.run_dir, self.spec.port)
        try:
            for old in (self.run_dir / "logs").glob("*.log"):
                old.unlink(missing_ok=True)
            async with asyncio.timeout(self._start_timeout_s):
                await self._start_all()
        except BaseExceptionGroup as group:
            await self.stop()
            raise next(_leaves(group)) from None
        except TimeoutError:
            late = next((c for c in self.children if c.state != "ready"), self.children[0])
            await self.stop()
            raise ChildDied(late, f"was not ready within {self._start_timeout_s:.0f} s") from None
        except BaseException:
            await self.stop()
            raise
        self._write_run_file()

    def check_ports(self) -> None:
        """Raises ConfigError when a port that was asked for is taken."""
        for plan in self._plans:
            if plan.settings.port:
                name = "PORT" if plan.role == "gateway" else "ROUTER_PORT"
                readiness.check_port(plan.settings.host, plan.settings.port, name)

    # --- starting --------------------------------------------------------------------------------

    async def _start_all(self) -> None:
        shared = await self._start_bus() | self._make_pool()
        write_worker_environment(self.worker_file, worker_environment(self._plans, shared), self.spec.config)
        environment = child_environment(shared)
        pairs = [(plan, self._new_child(plan.name, plan.role)) for plan in self._plans]
        async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as group:
            for plan, child in pairs:
                group.create_task(self._start_service(plan, child, environment, session))

    async def _start_bus(self) -> dict[str, str]:
        """Start nats-server unless one is given; gives what the services' environments get besides."""
        router = self._plans[0].settings
        overrides: dict[str, str] = {}
        if not router.secret.get_secret_value():
            overrides[f"{ENV_PREFIX}SECRET"] = secrets.token_hex(32)
        if "nats_url" in router.model_fields_set:
            return overrides
        port, config = readiness.free_port(), self.run_dir / "nats.conf"
        overrides[f"{ENV_PREFIX}NATS_URL"] = readiness.write_nats_config(config, port)
        child = self._new_child("nats", "nats")
        command = [str(readiness.nats_binary()), "--config", str(config)]
        await child.start(command, child_environment({}), announces=False)
        await self._reach(child, readiness.until_nats_greets(port))
        child.listening(f"nats://127.0.0.1:{port}")
        child.ready()
        self._watcher.changed(child)
        return overrides

    def _make_pool(self) -> dict[str, str]:
        """What the environments get so that workers share KV; empty where they do not, or were told where."""
        workers = [plan.settings for plan in self._plans if isinstance(plan.settings, EngineSettings)]
        if self.spec.topology != "pooled" or any(settings.kv_pool for settings in workers):
            return {}
        self._kv_pool = OwnPool(workers[0].cluster, self.run_dir)
        return {f"{ENV_PREFIX}KV_POOL": self._kv_pool.url}

    async def _start_service(
        self,
        plan: ProcessSpec,
        child: ChildProcess,
        environment: dict[str, str],
        session: aiohttp.ClientSession,
    ) -> None:
        await child.start(plan.command, environment, announces=True)
        self._watcher.changed(child)
        await self._reach(child, child.hear_address())
        self._watcher.changed(child)
        await self._reach(child, readiness.until_ready(session, child.address))
        child.ready()
        self._watcher.changed(child)

    async def _reach(self, child: ChildProcess, step: Coroutine[Any, Any, None]) -> None:
        if not await child.unless_it_ends(step):
            self._watcher.changed(child)
            raise ChildDied(child, f"ended with code {child.exit_code} before it was ready")

    def _new_child(self, name: str, role: str) -> ChildProcess:
        child = ChildProcess(name, role, self.run_dir / "logs" / f"{name}.log")
        self.children.append(child)
        return child

    # --- running ---------------------------------------------------------------------------------

    async def watch(self) -> None:
        """Tell the watcher of every child that ends, for ever: a cluster is not torn down for one death."""
        async with asyncio.TaskGroup() as group:
            for child in self.children:
                group.create_task(self._watch(child))
            await asyncio.Event().wait()

    async def _watch(self, child: ChildProcess) -> None:
        await child.exited()
        self._watcher.changed(child)

    async def stop(self) -> None:
        """Drain the services, then end nats-server; nothing runs any more after STOP_S. Idempotent."""
        if self._lock is None:
            return
        loop = asyncio.get_running_loop()
        begin = loop.time()
        self.died = [child.name for child in self.children if child.state == "exited"]
        started = [child for child in self.children if child.state != "waiting"]
        services = [child for child in started if child.role != "nats"]
        for number, until in ((signal.SIGTERM, DRAIN_S), (signal.SIGTERM, KILL_S), (signal.SIGKILL, STOP_S)):
            await _signal_and_wait(services, number, begin + until - loop.time())
        rest = [child for child in started if child.role == "nats"]
        for number, until in ((signal.SIGTERM, STOP_S), (signal.SIGKILL, STOP_S + 1)):
            await _signal_and_wait(rest, number, begin + until - loop.time())
        if self._kv_pool is not None:
            await asyncio.to_thread(self._kv_pool.remove)
        self.run_file.unlink(missing_ok=True)
        self.worker_file.unlink(missing_ok=True)
        self._lock.close()
        self._lock = None

    # --- files -----------------------------------------------------------------------------------

    @property
    def run_file(self) -> Path:
        return self.run_dir / "run.json"

    @property
    def worker_file(self) -> Path:
        return self.run_dir / "worker.env"

    def _write_run_file(self) -> None:
        body = {
            "url": self.url,
            "topology": self.spec.topology,
            "launcher": os.getpid(),
            "processes": [child.summary() for child in self.children],
        }
        temporary = self.run_file.with_suffix(".new")
        temporary.write_bytes(orjson.dumps(body, option=orjson.OPT_INDENT_2))
        temporary.replace(self.run_file)


async def _signal_and_wait(children: list[ChildProcess], number: signal.Signals, seconds: float) -> None:
    alive = [child for child in children if child.state != "exited"]
    if not alive:
        return
    for child in alive:
        child.send(number)
    exits = [asyncio.ensure_future(child.exited()) for child in alive]
    await asyncio.wait(exits, timeout=max(0.0, seconds))
    for exit_ in exits:
        exit_.cancel()


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error


def claim_run_dir(base: Path, port: int) -> tuple[Path, TextIO]:
    """`base`, or `base`/port-PORT while another launcher uses `base`; the open file is the claim.

    Raises ConfigError when neither can be had.
    """
    for candidate in (base, base / f"port-{port}"):
        try:
            (candidate / "logs").mkdir(parents=True, exist_ok=True)
            lock = (candidate / "lock").open("w")
        except OSError as error:
            raise ConfigError(f"cannot write {candidate}: {error.strerror}", param="run_dir") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            continue
        return candidate, lock
    raise ConfigError(f"another cluster runs in {base}; give another run directory", param="run_dir")
