"""One service as a real process, for tests: started, its address read from its log, stopped by signal."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import orjson

ROOT = Path(__file__).resolve().parents[2]
START_S = 30.0


class ServiceProcess:
    """`python -m <module> <arguments>`; its log lines are kept in `lines`."""

    def __init__(self, process: asyncio.subprocess.Process, session: aiohttp.ClientSession) -> None:
        self.process = process
        self.lines: list[dict[str, object]] = []
        self.url = ""
        self._session = session

    async def listening(self) -> None:
        """Returns when it has announced its address."""
        async with asyncio.timeout(START_S):
            while not self.url:
                assert self.process.stdout is not None
                line = await self.process.stdout.readline()
                assert line, f"it ended with {await self.process.wait()}: {self.lines}"
                self.lines.append(orjson.loads(line))
                self.url = str(self.lines[-1].get("http_url", ""))

    async def get(self, path: str) -> tuple[int, object]:
        """Status and JSON of a GET."""
        async with self._session.get(self.url + path) as answer:
            return answer.status, orjson.loads(await answer.read())

    async def until(self, path: str, status: int, timeout_s: float = 10.0) -> object:
        """The JSON of `path` once it answers with `status`; another process can only be asked."""
        async with asyncio.timeout(timeout_s):
            while True:
                seen, body = await self.get(path)
                if seen == status:
                    return body
                await asyncio.sleep(0.05)

    async def terminate(self, timeout_s: float = 10.0) -> int:
        """SIGTERM; the exit code."""
        self.process.terminate()
        async with asyncio.timeout(timeout_s):
            await self.process.communicate()
        assert self.process.returncode is not None
        return self.process.returncode


@asynccontextmanager
async def running_service(module: str, *arguments: str) -> AsyncIterator[ServiceProcess]:
    """A listening service, killed at the end if the test has not ended it."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, *arguments, cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    try:
        async with aiohttp.ClientSession() as session:
            service = ServiceProcess(process, session)
            await service.listening()
            yield service
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()
