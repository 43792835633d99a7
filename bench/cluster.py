"""A cluster of the bench's own: on free ports, apart from any other on this machine, gone afterwards.

What the bench does not set comes from `GALLEY_*`, so `GALLEY_MODEL=... python -m bench smoke` works.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from bench.target import WORKER_ROLES, Target
from common.errors import ConfigError
from deploy.local.cluster import ChildDied, LocalCluster
from deploy.local.model import prepare_model
from deploy.local.processes import ChildProcess
from deploy.local.spec import ClusterSpec, ProcessSpec, plan_processes

RUN_DIR = Path(".galley/bench")
"""Where the logs of the last cluster are found."""
SHOWN_LOG_LINES = 20


class ClusterFailed(Exception):
    """The cluster did not come up; the message says why, last log lines included."""


@asynccontextmanager
async def own_cluster(
    spec: ClusterSpec,
    console: Console,
    *,
    plan: Callable[[ClusterSpec], list[ProcessSpec]] = plan_processes,
    run_dir: Path = RUN_DIR,
) -> AsyncIterator[Target]:
    """Start `spec` on free ports under a name of its own; stop it on leaving. Raises ClusterFailed.

    `plan` makes the processes of the spec that is started, for benches of other programs than our services.
    """
    settings = {"cluster": f"bench-{secrets.token_hex(4)}", **spec.settings}
    private = replace(spec, port=0, router_port=0, settings=settings)
    async with AsyncExitStack() as stack:
        try:
            cluster = LocalCluster(private, run_dir, _Screen(console), plans=plan(private))
            await prepare_model(cluster.gateway_settings)
            await stack.enter_async_context(cluster)
        except ConfigError as error:
            raise ClusterFailed(error.message) from error
        except ChildDied as error:
            lines = "\n".join(error.child.last_lines(SHOWN_LOG_LINES))
            raise ClusterFailed(f"{error.message}; {error.child.log} ends with\n{lines}") from error
        stack.push_async_callback(_end, asyncio.create_task(cluster.watch()))
        workers = [child.address for child in cluster.children if child.role in WORKER_ROLES]
        yield Target(cluster.url, tuple(workers), {child.name: child.pid for child in cluster.children})


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


class _Screen:
    """Shows that a cluster is coming up, and that a process has died under a bench."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def changed(self, child: ChildProcess) -> None:
        if child.state in ("ready", "exited"):
            how = f" with code {child.exit_code}" if child.state == "exited" else ""
            self._console.print(f"{child.name} {child.state}{how}", style="dim", highlight=False)
