"""A real cluster for tests: the product's own processes on free ports, asked over HTTP.

    async with real_cluster(model, tmp_path) as cluster: every process is ready

Leaving the block stops all, and fails if one had died before or did not end well. Knows nothing of what a
test asks for.
"""

import asyncio
import os
import secrets
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx

from bench.scrape import Snapshot
from deploy.local.cluster import ChildDied, LocalCluster
from deploy.local.presets import Preset
from deploy.local.processes import ChildProcess
from deploy.local.spec import ClusterSpec

MODEL = "served"
"""The name by which every cluster here serves its model."""
IDLE_WITHIN_S = 2.0

_ASK_AGAIN_S = 0.05
_ANSWER_S = 100.0
_BUSY_GAUGES = (
    "requests_in_flight",
    "requests_queued",
    "requests_prefilling",
    "requests_waiting_for_kv",
    "requests_decoding",
    "leases",
    "kv_blocks_quarantined",
)

T = TypeVar("T")


class RealCluster:
    """What tests ask of a running cluster. `http` is for requests of any other kind."""

    def __init__(self, cluster: LocalCluster, http: httpx.AsyncClient) -> None:
        self.url = cluster.url
        self.http = http
        self.killed: set[str] = set()
        self._children = cluster.children

    async def complete(self, prompt: Sequence[int] | str, **fields: Any) -> dict[str, Any]:
        """The body of a whole answer of /v1/completions."""
        ask = {"model": MODEL, "prompt": prompt if isinstance(prompt, str) else list(prompt)} | fields
        response = await self.http.post(f"{self.url}/v1/completions", json=ask)
        assert response.status_code == 200, response.text
        body: dict[str, Any] = response.json()
        return body

    async def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """The ids of the `count` tokens that follow `prompt`."""
        body = await self.complete(
            prompt, max_tokens=count, temperature=0, ignore_eos=True, return_token_ids=True
        )
        ids: list[int] = body["choices"][0]["token_ids"]
        assert len(ids) == count
        assert body["usage"]["prompt_tokens"] == len(prompt)
        return ids

    async def metrics(self, *roles: str) -> Snapshot:
        """The sums over all instances of `roles`."""
        alive = [child for child in self._children if child.name not in self.killed]
        urls = [child.address for child in alive if child.role in roles]
        assert urls
        answers = await asyncio.gather(*(self.http.get(f"{url}/metrics") for url in urls))
        return Snapshot([answer.raise_for_status().text for answer in answers])

    def kill(self, name: str) -> None:
        """kill -9."""
        os.kill(next(child.pid for child in self._children if child.name == name), signal.SIGKILL)
        self.killed.add(name)

    async def idle(self, within_s: float = IDLE_WITHIN_S) -> None:
        """Wait until no process holds anything for any request any more. Raises AssertionError."""
        await settled(self._held, within_s)

    async def _held(self) -> Mapping[str, float]:
        seen = await self.metrics("gateway", "prefill", "decode")
        held = {name: seen.total(f"galley_{name}") for name in _BUSY_GAUGES}
        held["kv_blocks used"] = seen.total("galley_kv_blocks", state="used")
        return {name: value for name, value in held.items() if value}


async def settled(left: Callable[[], Awaitable[Mapping[str, float]]], within_s: float) -> None:
    """Ask other processes, which nobody can await, until nothing is `left`. Raises AssertionError."""
    remaining: Mapping[str, float] = {}
    try:
        async with asyncio.timeout(within_s):
            while remaining := await left():  # noqa: ASYNC110 (metrics wake nobody)
                await asyncio.sleep(_ASK_AGAIN_S)
    except TimeoutError:
        raise AssertionError(f"after {within_s} s there are still {remaining}") from None


async def at_a_time(limit: int, calls: Iterable[Callable[[], Awaitable[T]]]) -> list[T]:
    """The results of all `calls`, in order, never more than `limit` under way."""
    room = asyncio.Semaphore(limit)

    async def call(one: Callable[[], Awaitable[T]]) -> T:
        async with room:
            return await one()

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(call(one)) for one in calls]
    return [task.result() for task in tasks]


@asynccontextmanager
async def real_cluster(
    model: Path,
    directory: Path,
    *,
    topology: Preset = "disaggregated",
    prefill: int = 1,
    decode: int = 1,
    **settings: str,
) -> AsyncIterator[RealCluster]:
    """So many prefill (when apart) and decode workers of `model` in float32; logs and more in `directory`.

    `settings` are service settings. To be entered on the main thread, which children's lives hang on.
    """
    chosen = {
        "model": str(model),
        "served_model_name": MODEL,
        "dtype": "float32",
        "device": "cpu",
        "num_blocks": "400",
        "threads": "1",
        "cluster": f"test-{secrets.token_hex(4)}",
    }
    spec = ClusterSpec(
        port=0,
        router_port=0,
        prefill=prefill,
        decode=decode,
        topology=topology,
        settings=chosen | settings,
    )
    local = LocalCluster(spec, directory, _Silent())
    try:
        async with local, httpx.AsyncClient(timeout=_ANSWER_S, trust_env=False) as http:
            cluster = RealCluster(local, http)
            yield cluster
    except ChildDied as error:
        raise AssertionError("\n".join([error.message, *error.child.last_lines(20)])) from error
    bad_ends = {
        child.name: child.exit_code
        for child in local.children
        if (child.exit_code or child.name in local.died) and child.name not in cluster.killed
    }
    assert not bad_ends, f"exit codes {bad_ends}"


class _Silent:
    def changed(self, child: ChildProcess) -> None:
        """Tests look at what they want to know."""
