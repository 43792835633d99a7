"""A real mooncake_master for tests, and clients of its store in processes of their own."""

import asyncio
import re
import sys
import sysconfig
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx
import orjson

from tests.support.nats import free_port

ROOT = Path(__file__).resolve().parents[2]
CLIENT_TTL_S = 4
_READY_S = 10.0
_RETRY_S = 0.02


class MooncakeMaster:
    """Keeps its ports over restarts. Forgets a silent client after CLIENT_TTL_S."""

    def __init__(self) -> None:
        self._port, self._metrics_port = free_port(), free_port()
        self._process: asyncio.subprocess.Process | None = None

    def url(self, segment: str = "64MiB", replicas: int = 1) -> str:
        return f"mooncake://127.0.0.1:{self._port}?segment={segment}&replicas={replicas}"

    async def start(self) -> None:
        """Returns when it accepts clients."""
        self._process = process = await asyncio.create_subprocess_exec(
            str(Path(sysconfig.get_path("scripts")) / "mooncake_master"),
            *("--rpc_address=127.0.0.1", f"--rpc_port={self._port}"),
            *("--metrics_host=127.0.0.1", f"--metrics_port={self._metrics_port}"),
            f"--client_ttl={CLIENT_TTL_S}",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        async with asyncio.timeout(_READY_S):
            while True:
                assert process.returncode is None, f"mooncake_master exited with {process.returncode}"
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", self._port)
                except OSError:
                    await asyncio.sleep(_RETRY_S)  # readiness of a foreign process can only be asked for
                    continue
                writer.close()
                return

    async def clients(self) -> int:
        """How many it takes to be alive."""
        async with httpx.AsyncClient(trust_env=False) as http:
            answer = await http.get(f"http://127.0.0.1:{self._metrics_port}/metrics")
        found = re.search(r"^master_active_clients (\d+)$", answer.text, re.MULTILINE)
        assert found, answer.text
        return int(found[1])

    async def kill(self) -> None:
        await _kill(self._process)


class PoolClient:
    """A process that has a pool open."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def ask(self, command: str, first: int, count: int) -> tuple[int | str, float]:
        """How many blocks, or why the pool is unavailable; and how many seconds that took."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{command} {first} {count}\n".encode())
        line = await asyncio.wait_for(self._process.stdout.readline(), 30)
        assert line, f"the client ended with {await self._process.wait()}"
        answer, seconds = orjson.loads(line)
        return answer, seconds

    async def blocks(self, command: str, first: int, count: int) -> int:
        answer, _ = await self.ask(command, first, count)
        assert isinstance(answer, int), answer
        return answer

    async def until(self, blocks: int, command: str, first: int, count: int, within_s: float = 15) -> None:
        """Ask until the answer is `blocks`: what the store does by itself tells nobody that it is done."""
        answer: int | str = ""
        try:
            async with asyncio.timeout(within_s):
                while answer != blocks:
                    answer, _ = await self.ask(command, first, count)
                    await asyncio.sleep(_RETRY_S)
        except TimeoutError:
            raise AssertionError(f"{command}: still {answer!r} after {within_s} s, not {blocks}") from None

    async def leave(self) -> int:
        """Close the pool and end; the exit code."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        await asyncio.wait_for(self._process.communicate(), 30)
        assert self._process.returncode is not None
        return self._process.returncode

    async def kill(self) -> None:
        await _kill(self._process)


class Clients:
    """Starts them; killed at the end."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack

    async def start(self, url: str) -> PoolClient:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.support.pool_client", url),
            cwd=ROOT,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        client = PoolClient(process)
        self._stack.push_async_callback(client.kill)
        return client


@asynccontextmanager
async def running_master() -> AsyncIterator[MooncakeMaster]:
    master = MooncakeMaster()
    try:
        await master.start()
        yield master
    finally:
        await master.kill()


@asynccontextmanager
async def pool_clients() -> AsyncIterator[Clients]:
    async with AsyncExitStack() as stack:
        yield Clients(stack)


async def _kill(process: asyncio.subprocess.Process | None) -> None:
    """kill -9; returns when it is gone."""
    if process is not None and process.returncode is None:
        process.kill()
        await process.communicate()
