"""The life of a service's process: start, signals, drain, stop, exit code.

A service is one coroutine function given a ServiceContext. It starts what it needs, announces its address,
waits for `context.stopping`, drains and returns. Knows nothing of what services do.

    starting --announce--> serving --SIGTERM, SIGINT--> draining --main returns--> exit 0
       any state: main raises ConfigError -> exit 2; raises anything else -> exit 1
       draining: a second signal, or drain_seconds + GRACE_S, cancels main -> exit 0
"""

import asyncio
import contextlib
import gc
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import NoReturn

import orjson
import structlog
import uvloop

from common.clock import Clock, SystemClock
from common.config import EngineSettings, ServiceSettings, parse_cores
from common.errors import ConfigError, GalleyError
from common.ids import IdSource, Incarnation, InstanceId, InstanceRef, SystemIds
from common.messages.cluster import Role
from common.observability.logging import configure_logging

log = structlog.get_logger()

GRACE_S = 5.0
"""What a service has after its drain to close its connections, before it is cancelled."""


@dataclass(slots=True)
class ServiceContext:
    """What a service gets from its process. `stopping` is set when it shall drain and return."""

    ref: InstanceRef
    role: Role
    clock: Clock
    ids: IdSource
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    announce_fd: int | None = None

    def announce(self, http_url: str) -> None:
        """Make the address known once the HTTP server listens: in the log, and to the launcher if any."""
        log.info("listening", http_url=http_url, pid=os.getpid())
        if self.announce_fd is not None:
            line = orjson.dumps({"http_url": http_url, "pid": os.getpid()}) + b"\n"
            with contextlib.suppress(BrokenPipeError):
                os.write(self.announce_fd, line)
            os.close(self.announce_fd)
            self.announce_fd = None


Main = Callable[[ServiceContext], Awaitable[None]]
LoopFactory = Callable[[], asyncio.AbstractEventLoop]


def run_service(
    settings: ServiceSettings, main: Main, *, loop_factory: LoopFactory = uvloop.new_event_loop
) -> NoReturn:
    """Run `main` to its end and end the process with its exit code. Does not return."""
    configure_logging(settings.log_level, settings.instance, settings.role)
    try:
        if isinstance(settings, EngineSettings):
            pin_to_cores(settings.cores)
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            code = runner.run(_supervise(settings, main))
    except KeyboardInterrupt:
        code = 130
    except ConfigError as error:
        code = _report(error)
    _leave(code)


def settle() -> None:
    """Leave all that this process is made of by now out of later garbage collections.

    Looking through torch and its libraries takes 200 ms and more, in which no step and no frame moves.
    """
    gc.collect()
    gc.freeze()


def _leave(code: int) -> NoReturn:
    """End the process. What is left of it is the interpreter's own end, which no signal shall cut short."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    gc.freeze()  # else its last collections walk through all of torch, for seconds
    sys.stdout.flush()
    sys.exit(code)


def pin_to_cores(spec: str) -> None:
    """Keep this process and its later threads on the cores of `spec`; "" keeps all.

    Raises ConfigError when this machine does not give them.
    """
    wanted, allowed = set(parse_cores(spec)), os.sched_getaffinity(0)
    if wanted - allowed:
        have = ",".join(map(str, sorted(allowed)))
        raise ConfigError(f"cores = {spec!r}: this process may use cores {have}", param="cores")
    if wanted:
        os.sched_setaffinity(0, wanted)


async def _supervise(settings: ServiceSettings, main: Main) -> int:
    """Run `main` under signals and the drain's deadline; gives the exit code."""
    loop, ids = asyncio.get_running_loop(), SystemIds()
    context = ServiceContext(
        ref=InstanceRef(InstanceId(settings.instance), Incarnation(ids.hex())),
        role=settings.role,
        clock=SystemClock(),  # uvloop's own counts whole milliseconds, of which a transfer has few
        ids=ids,
        announce_fd=settings.announce_fd,
    )
    task = loop.create_task(_run(main, context))

    def stop() -> None:
        if context.stopping.is_set():
            log.warning("stopping now")
            task.cancel()
            return
        log.info("draining", seconds=settings.drain_seconds)
        context.stopping.set()
        loop.call_later(settings.drain_seconds + GRACE_S, task.cancel)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    log.info("starting", pid=os.getpid(), incarnation=context.ref.incarnation)
    try:
        code = await task
    except asyncio.CancelledError:
        code = 0 if context.stopping.is_set() else 1
    except BaseExceptionGroup as group:
        code = _report(_first(group))
    except Exception as error:
        code = _report(error)
    log.info("stopped", code=code)
    return code


async def _run(main: Main, context: ServiceContext) -> int:
    await main(context)
    if context.stopping.is_set():
        return 0
    log.error("ended by itself")
    return 1


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first leaf: what broke first in a task group is what there is to tell."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _report(error: BaseException) -> int:
    """Log why the service ends, in one line for what we raise on purpose; gives the exit code."""
    if isinstance(error, GalleyError):
        log.error("failed", error=error.message, code=error.code)
        return 2 if isinstance(error, ConfigError) else 1
    log.error("failed", error=f"{type(error).__name__}: {error}", exc_info=error)
    return 1
