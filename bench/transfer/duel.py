"""Our endpoints beside ucx_perftest, between the same two cores, in turn.

Both send messages of one KV block, 32 in flight. ucx_perftest (Debian's ucx-utils, with a UCX of its own)
runs with UCX's own settings and sends one and the same block, ours with what a worker would have chosen, from
a pool to a pool. Knows nothing of figures.
"""

import asyncio
import os
import shutil
import socket
import statistics
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson

from common.config import child_environment
from common.transport.ucx_selftest import UcxOptions

PROGRAM = "ucx_perftest"
BLOCK_BYTES = 368_640
IN_FLIGHT = 32
ROUNDS = 7
MESSAGES = 2000
WARM_UP = 200
LIMIT_S = 30.0
_MIB = 1 << 20


class DuelFailed(Exception):
    """One of the two could not be measured; the text says why."""


@dataclass(frozen=True, slots=True)
class Duel:
    """Bytes a second: the median over all rounds."""

    ours: float
    perftest: float

    @property
    def ratio(self) -> float:
        return self.ours / self.perftest


async def fight(options: UcxOptions, cores: tuple[int, int]) -> AsyncIterator[Duel]:
    """The medians so far, after each of ROUNDS rounds. Raises DuelFailed."""
    ours: list[float] = []
    perftest: list[float] = []
    for _ in range(ROUNDS):
        try:
            async with asyncio.timeout(LIMIT_S):
                ours.append(await our_rate(options, cores))
                perftest.append(await perftest_rate(cores))
        except TimeoutError:
            raise DuelFailed(f"a round took more than {LIMIT_S:.0f} s") from None
        yield Duel(statistics.median(ours), statistics.median(perftest))


async def our_rate(options: UcxOptions, cores: tuple[int, int]) -> float:
    """Bytes a second between two fresh processes of ours, their median round. Raises DuelFailed."""
    text = orjson.dumps(asdict(options)).decode()
    command = (sys.executable, "-m", "common.transport.ucx_probe")
    async with _running((*command, "serve", text), cores[0]) as server:
        address = await _line(server, "probe ")
        async with _running((*command, "pull", text, address), cores[1]) as client:
            return 1e9 * float(orjson.loads(await _line(client, "probe "))["median_gbps"])


async def perftest_rate(cores: tuple[int, int]) -> float:
    """Bytes a second as ucx_perftest says. Raises DuelFailed."""
    port = _free_port()
    if shutil.which(PROGRAM) is None:
        raise DuelFailed(f"there is no {PROGRAM}: install Debian's ucx-utils")
    what = ("-t", "tag_bw", "-s", str(BLOCK_BYTES), "-O", str(IN_FLIGHT), "-n", str(MESSAGES))
    command = ("stdbuf", "-oL", PROGRAM, "-p", str(port), *what, "-w", str(WARM_UP), "-f", "-v")
    async with _running(command, cores[0]) as server:
        await _line(server, "Waiting for connection")
        async with _running((*command, "127.0.0.1"), cores[1]) as client:
            return overall_rate(await _line(client, str(MESSAGES)))


def overall_rate(values: str) -> float:
    """Bytes a second from what follows the number of messages in a line of its CSV: percentile, average and
    overall latency, then average and overall bandwidth, in MiB/s. Raises DuelFailed."""
    try:
        return float(values.strip(" ,").split(",")[4]) * _MIB
    except (ValueError, IndexError):
        raise DuelFailed(f"{PROGRAM} wrote what was not to be understood: {values!r}") from None


@asynccontextmanager
async def _running(command: Sequence[str], core: int) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process on `core`, gone at the end."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})  # what is started inherits it
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            cwd=Path(__file__).parents[2],
            env=child_environment({"UCX_WARN_UNUSED_ENV_VARS": "n"}),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
    finally:
        os.sched_setaffinity(0, before)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _line(process: asyncio.subprocess.Process, beginning: str) -> str:
    """The rest of the first line that begins so. Raises DuelFailed when none comes."""
    assert process.stdout is not None
    seen = ""
    while line := (await process.stdout.readline()).decode(errors="replace"):
        if line.strip().startswith(beginning):
            return line.strip().removeprefix(beginning)
        seen = line.strip() or seen
    raise DuelFailed(f"a child ended without its answer, its last line was {seen!r}")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
