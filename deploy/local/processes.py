"""One child process of the launcher: started, watched, stopped; its output in a log file.

    waiting --start--> starting --address known--> listening --probe answered--> ready
    any but waiting --process ends--> exited

A child is in a session of its own, so that Ctrl-C reaches only the launcher, and the kernel kills it when
the launcher dies (child.py). Knows nothing of what the child does.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Coroutine, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any, Literal

import orjson

State = Literal["waiting", "starting", "listening", "ready", "exited"]

_CHILD = str(Path(__file__).with_name("child.py"))
_TAIL_BYTES = 16_384


def mortal(command: Sequence[str]) -> list[str]:
    """`command`, so changed that the kernel kills it when this process dies; same pid, same exit code."""
    return [sys.executable, "-I", "-S", _CHILD, str(os.getpid()), *command]


class ChildProcess:
    """See the module's docstring for the states. `address` is where it listens, once known."""

    def __init__(self, name: str, role: str, log: Path) -> None:
        self.name = name
        self.role = role
        self.log = log
        self.state: State = "waiting"
        self.address = ""
        self.pid = 0
        self.exit_code: int | None = None
        self.was_ready = False
        self._process: asyncio.subprocess.Process | None = None
        self._exit: asyncio.Task[int] | None = None
        self._announcements: FileIO | None = None

    async def start(self, command: Sequence[str], environment: Mapping[str, str], *, announces: bool) -> None:
        """Run `command`. With `announces` it is given `--announce-fd`, see `hear_address`."""
        loop = asyncio.get_running_loop()
        self.state = "starting"
        reader, writer = os.pipe() if announces else (-1, -1)
        extra = [f"--announce-fd={writer}"] if announces else []
        try:
            with self.log.open("wb") as log:
                process = await asyncio.create_subprocess_exec(
                    *mortal([*command, *extra]),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=dict(environment),
                    pass_fds=(writer,) if announces else (),
                    start_new_session=True,
                )
        finally:
            if announces:
                os.close(writer)
                self._announcements = os.fdopen(reader, "rb", buffering=0)
        self._process, self.pid = process, process.pid
        self._exit = loop.create_task(self._see_exit(process))

    async def _see_exit(self, process: asyncio.subprocess.Process) -> int:
        self.exit_code = await process.wait()
        self.state = "exited"
        return self.exit_code

    async def hear_address(self) -> None:
        """Wait until the child tells where it listens, or has ended without."""
        assert self._announcements is not None
        stream = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), self._announcements
        )
        try:
            line = await stream.readline()
        finally:
            transport.close()
        if not line:
            await self.exited()
        else:
            self.listening(str(orjson.loads(line)["http_url"]))

    async def exited(self) -> int:
        """Wait for the process's end; gives its exit code, negative for a signal."""
        assert self._exit is not None
        return await asyncio.shield(self._exit)

    async def unless_it_ends(self, work: Coroutine[Any, Any, None]) -> bool:
        """Do `work` as long as the process lives; False, and `work` is cancelled, when it ended first."""
        assert self._exit is not None
        task = asyncio.get_running_loop().create_task(work)
        try:
            await asyncio.wait((task, self._exit), return_when=asyncio.FIRST_COMPLETED)
            if self._exit.done():
                return False
            await task
            return True
        finally:
            task.cancel()
            await asyncio.wait((task,))

    def listening(self, address: str) -> None:
        self.address, self.state = address, "listening"

    def ready(self) -> None:
        self.was_ready, self.state = True, "ready"

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process and what it started; does nothing once it has ended."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                if number == signal.SIGKILL:
                    os.killpg(self.pid, number)
                else:
                    self._process.send_signal(number)

    def summary(self) -> dict[str, str | int]:
        """What run.json tells of it."""
        return {
            "name": self.name,
            "role": self.role,
            "instance": self.name,
            "pid": self.pid,
            "http_url": self.address,
            "log": str(self.log.resolve()),
        }

    def last_lines(self, count: int) -> list[str]:
        """The end of its log, as readable lines."""
        try:
            with self.log.open("rb") as log:
                log.seek(max(0, self.log.stat().st_size - _TAIL_BYTES))
                lines = log.read().decode(errors="replace").splitlines()
        except OSError:
            return []
        return [readable(line) for line in lines[-count:]]


def readable(line: str) -> str:
    """A JSON log line as a person reads it: event, then what belongs to it; other lines as they are."""
    try:
        event = orjson.loads(line)
    except orjson.JSONDecodeError:
        return line
    if not isinstance(event, dict) or "event" not in event:
        return line
    hidden = ("event", "level", "time", "instance", "role", "exception", "logger")
    details = [f"{key}={value}" for key, value in event.items() if key not in hidden]
    text = " ".join([str(event["event"]), *details])
    return f"{text}\n{event['exception']}" if "exception" in event else text
