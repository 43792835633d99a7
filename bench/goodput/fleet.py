"""Contestants that are up: started once, only one of them running at any time, the others frozen.

A frozen cluster (SIGSTOP) takes no core from the one that is measured. Knows nothing of rates and SLOs.
"""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field

import httpx
from rich.console import Console

from bench.client import open_client
from bench.cluster import RUN_DIR, ClusterFailed, own_cluster
from bench.goodput.contestants import Contestant
from bench.goodput.load import Endpoint
from bench.processes import busy_and_stolen_seconds, cpu_seconds
from deploy.local.spec import ClusterSpec, ProcessSpec, plan_processes

MODE_TIMEOUT_S = 600.0
PROBE_S = 0.5
THAW_S = 1.0
"""Five beats: by then everybody has heard of everybody again."""
REST_S = 2.0
"""The same where there are servers of others: vLLM's workers spin for a second after their last request."""

Plan = Callable[[ClusterSpec], list[ProcessSpec]]


@dataclass(frozen=True, slots=True)
class Running:
    """A contestant that is up. `modes` is how each worker runs its steps, final; `pids` by process name."""

    contestant: Contestant
    endpoints: tuple[Endpoint, ...]
    modes: Mapping[str, str] = field(default_factory=dict)
    pids: Mapping[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.contestant.name

    def send(self, number: signal.Signals) -> None:
        for pid in self.pids.values():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def groups(self) -> dict[str, tuple[int, ...]]:
        """Processes by what they are: gateway, router, nats, prefill, decode; and the client, which is us."""
        found: dict[str, tuple[int, ...]] = {"client": (os.getpid(),)}
        for name, pid in self.pids.items():
            role = name.partition("-")[0]
            found[role] = (*found.get(role, ()), pid)
        return found


@asynccontextmanager
async def running(
    contestant: Contestant, console: Console, *, plan: Plan = plan_processes
) -> AsyncIterator[Running]:
    """Start it, or find it at its addresses; it is awake inside the block.

    Raises ClusterFailed when it does not come up or its engine mode does not settle, ServerRefused.
    """
    if contestant.spec is None:
        endpoints = tuple([await _endpoint(url) for url in contestant.urls])
        yield Running(contestant, endpoints)
        return
    run_dir = RUN_DIR / f"goodput-{contestant.name}"
    async with own_cluster(contestant.spec, console, plan=plan, run_dir=run_dir) as target:
        modes = await final_modes(target.workers)
        found = Running(contestant, (await _endpoint(target.url),), modes, target.pids)
        try:
            yield found
        finally:
            found.send(signal.SIGCONT)  # a frozen process would not hear that it shall stop


class Fleet:
    """All contestants of a comparison; made by `fleet_of`."""

    def __init__(self, members: Sequence[Running]) -> None:
        self.members = {member.name: member for member in members}
        self._rest_s = THAW_S if all(member.pids for member in members) else REST_S

    @asynccontextmanager
    async def awake(self, name: str) -> AsyncIterator[Running]:
        """Only this one runs inside the block."""
        member = self.members[name]
        member.send(signal.SIGCONT)
        await asyncio.sleep(self._rest_s)
        try:
            yield member
        finally:
            member.send(signal.SIGSTOP)


@asynccontextmanager
async def fleet_of(
    contestants: Sequence[Contestant], console: Console, *, plan: Plan = plan_processes
) -> AsyncIterator[Fleet]:
    """Start all, one after the other, and freeze each once it is ready."""
    async with AsyncExitStack() as stack:
        members = []
        for contestant in contestants:
            member = await stack.enter_async_context(running(contestant, console, plan=plan))
            members.append(member)
            member.send(signal.SIGSTOP)
        stack.callback(_thaw, members)
        yield Fleet(members)


def _thaw(members: Sequence[Running]) -> None:
    for member in members:
        member.send(signal.SIGCONT)


async def final_modes(workers: Sequence[str]) -> dict[str, str]:
    """The engine mode of every worker, once it will not change any more. Raises ClusterFailed.

    A worker that tells of none (one without a model) has none to wait for.
    """
    try:
        async with asyncio.timeout(MODE_TIMEOUT_S), httpx.AsyncClient(trust_env=False) as http:
            return {url: await _final_mode(http, url) for url in workers}
    except TimeoutError:
        raise ClusterFailed(f"the engine mode was not final within {MODE_TIMEOUT_S:.0f} s") from None
    except (httpx.HTTPError, ValueError) as error:
        raise ClusterFailed(f"a worker does not tell its engine mode: {error}") from error


async def _final_mode(http: httpx.AsyncClient, url: str) -> str:
    while True:
        told = (await http.get(f"{url}/readyz")).json()
        if told.get("engine_mode_final", "yes") == "yes":
            return str(told.get("engine_mode", ""))
        await asyncio.sleep(PROBE_S)


async def _endpoint(url: str) -> Endpoint:
    async with open_client(url) as client:
        return Endpoint(url, client.model)


class CoreMeter:
    """Who uses how much of a core from its making on, and what else ran on `cores` meanwhile."""

    def __init__(self, member: Running, cores: Sequence[int]) -> None:
        self._groups, self._cores = member.groups(), cores
        self._began, self._before = time.monotonic(), self._read()

    def shares(self) -> dict[str, float]:
        """By group, plus `elsewhere` (others on these cores) and `stolen` (by the machine's host)."""
        wall = max(time.monotonic() - self._began, 1e-9)
        after = self._read()
        used = {name: (after[name] - before) / wall for name, before in self._before.items()}
        ours = sum(used[name] for name in self._groups)
        return {**used, "elsewhere": max(0.0, used["elsewhere"] - ours)}

    def _read(self) -> dict[str, float]:
        found = {name: sum(map(_seconds, pids)) for name, pids in self._groups.items()}
        busy, stolen = busy_and_stolen_seconds(self._cores)
        return {**found, "elsewhere": busy, "stolen": stolen}


def _seconds(pid: int) -> float:
    try:
        return cpu_seconds(pid)
    except (OSError, IndexError):  # it has died, which its requests will tell
        return 0.0
