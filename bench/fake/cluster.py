"""A cluster whose gateway, router and NATS are real and whose workers echo; for benches of the gateway.

The gateway has one core to itself, everything else, the bench with it, another one.
"""

import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial

import httpx

from bench.cluster import ClusterFailed, own_cluster
from bench.frame import Frame
from bench.processes import cpu_seconds, pin, resident_bytes
from deploy.local.spec import ClusterSpec, ProcessSpec, plan_processes

MIN_CORES = 2


@dataclass(frozen=True, slots=True)
class EchoCluster:
    """`fleet` is the workers' HTTP address; `gateway_pid` and `other_pids` what is measured on each core."""

    url: str
    fleet: str
    gateway_pid: int
    other_pids: tuple[int, ...]

    async def set_pace(self, step_s: float) -> None:
        async with httpx.AsyncClient(trust_env=False) as http:
            answer = await http.post(f"{self.fleet}/pace", json={"step_ms": step_s * 1e3})
            answer.raise_for_status()

    async def take_times(self) -> dict[str, list[float]]:
        """Per request, since the last call: when its job came to the worker, and each token's emission."""
        async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
            answer = await http.get(f"{self.fleet}/times")
            times: dict[str, list[float]] = answer.raise_for_status().json()
            return times

    def gateway_cpu(self) -> float:
        return cpu_seconds(self.gateway_pid)

    def other_cpu(self) -> float:
        return sum(map(cpu_seconds, self.other_pids))

    def gateway_bytes(self) -> int:
        return resident_bytes(self.gateway_pid)


@asynccontextmanager
async def echo_cluster(
    frame: Frame,
    *,
    workers: int,
    max_num_seqs: int,
    step_ms: float,
    settings: Mapping[str, str] | None = None,
) -> AsyncIterator[EchoCluster]:
    """Start it and stop it. Raises ClusterFailed, also where there are fewer than two cores."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < MIN_CORES:
        raise ClusterFailed(f"a core for the gateway and one for the rest are needed; there is {len(cores)}")
    spec = ClusterSpec(decode=1, topology="chunked", settings=settings or {})
    own, rest = cores[0], cores[1]
    os.sched_setaffinity(0, {rest})  # children inherit it
    try:
        plan = partial(_plan, workers=workers, max_num_seqs=max_num_seqs, step_ms=step_ms)
        async with own_cluster(spec, frame.console, plan=plan) as target:
            gateway = target.pids["gateway-0"]
            pin(gateway, {own})
            others = [pid for name, pid in target.pids.items() if name != "gateway-0"]
            yield EchoCluster(target.url, target.workers[0], gateway, (*others, os.getpid()))
    finally:
        os.sched_setaffinity(0, cores)


def _plan(spec: ClusterSpec, *, workers: int, max_num_seqs: int, step_ms: float) -> list[ProcessSpec]:
    """The processes of `spec`, with one fleet of echoing workers in the place of its decode worker."""
    fleet = (f"--workers={workers}", f"--step-ms={step_ms}", f"--max-num-seqs={max_num_seqs}")
    return [
        replace(plan, module="bench.fake.worker", argv=(*plan.argv, *fleet, "--max-num-batched-tokens=8192"))
        if plan.role == "decode"
        else plan
        for plan in plan_processes(spec)
    ]
