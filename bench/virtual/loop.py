"""An asyncio event loop in virtual time: when nothing is ready, the clock jumps to the next timer.

A cluster of services runs through minutes of protocol in milliseconds, and the same way every time. There
are no sockets, processes or threads: `run_in_executor` calls its function on the spot, in no time at all.
When nothing is ready and no timer is set, nobody can ever wake anybody: that is a Deadlock, reported
with where every task stands.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Deadlock(AssertionError):
    """Every task waits for something that nothing is going to do."""


class Overtime(AssertionError):
    """The virtual time limit has passed; periodic tasks would keep the loop going for ever."""


class VirtualLoop(asyncio.base_events.BaseEventLoop):
    """Drop-in event loop whose `time()` is virtual seconds, from `start` for at most `limit_s`."""

    def __init__(self, limit_s: float, start: float = 1000.0) -> None:
        super().__init__()
        self._virtual_now = start
        self._end: float | None = start + limit_s
        self._selector = _NoSelector(self._idle)
        self.failures: list[BaseException] = []
        """What callbacks and forgotten tasks raised; run_virtual raises it."""
        self.set_exception_handler(self._note_failure)

    def time(self) -> float:
        return self._virtual_now

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]  # noqa: ARG002
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def _idle(self, timeout: float | None) -> list[Any]:
        if timeout is None:
            raise Deadlock(f"nothing ready, no timer set\n{_where_tasks_stand(self)}")
        self._virtual_now += timeout
        if self._end is not None and self._virtual_now > self._end:
            self._end = None  # cancelled tasks may still need time to clean up
            raise Overtime(f"not done within the limit\n{_where_tasks_stand(self)}")
        return []

    def _process_events(self, _events: list[Any]) -> None:
        """There are no file descriptors."""

    def _write_to_self(self) -> None:
        """Only a signal handler calls this; the loop never sleeps, so there is nobody to wake."""

    def _note_failure(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.failures.append(context.get("exception") or RuntimeError(context["message"]))


class _NoSelector:
    def __init__(self, idle: Callable[[float | None], list[Any]]) -> None:
        self.select = idle


def run_virtual(main: Coroutine[Any, Any, T], *, limit_s: float = 3600.0) -> T:
    """Run `main` to its end in virtual time and return its result.

    Raises Overtime after `limit_s` virtual seconds, Deadlock, and whatever a callback or an unwatched task
    raised meanwhile.
    """
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(limit_s)) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, VirtualLoop)
        result = runner.run(main)
    if loop.failures:
        raise loop.failures[0]
    return result


def _where_tasks_stand(loop: asyncio.AbstractEventLoop) -> str:
    lines = []
    for task in asyncio.all_tasks(loop):
        frames = task.get_stack(limit=1)
        where = f"{frames[0].f_code.co_filename}:{frames[0].f_lineno}" if frames else "not started"
        lines.append(f"  {task.get_name()}: {where}")
    return "\n".join(sorted(lines))
