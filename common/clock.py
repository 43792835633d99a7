"""Clocks: the only way that a core without I/O learns what time it is.

Times are float seconds on a monotonic scale whose zero means nothing. Waiting is not a clock's business:
services wait with asyncio, whose loop runs on the same scale (SystemClock equals the default loop's
time(); LoopClock reads whatever loop is running, a virtual-time loop included).
"""

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Monotonic seconds."""
        ...

    def wall(self) -> float:
        """Seconds since the epoch; for people and for OpenAI's `created`, never for waiting."""
        ...


class SystemClock:
    def now(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()


class LoopClock:
    """The running event loop's own time, so that a service follows a virtual-time loop unchanged."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def now(self) -> float:
        return self._loop.time()

    def wall(self) -> float:
        return time.time()


class VirtualClock:
    """A clock that moves only when told to; for cores and simulators."""

    def __init__(self, now: float = 0.0) -> None:
        self._now = now

    def now(self) -> float:
        return self._now

    def wall(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Move forward. Raises ValueError for a negative step: monotonic time does not go back."""
        if seconds < 0:
            raise ValueError(f"a clock cannot go back by {seconds} s")
        self._now += seconds
