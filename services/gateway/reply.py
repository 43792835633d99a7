"""What a request yields, between the gateway that fills it and the one reader that empties it.

Bounded in bytes: a reader that falls behind loses the request, not the gateway its memory. Knows nothing of
HTTP.
"""

import asyncio
from collections.abc import Callable
from typing import Self

from common.errors import Cancelled, GalleyError
from services.gateway.request import Delta, Timing, Usage

Batch = list[Delta]


class Reply:
    """Async iterator over batches: everything that arrived since the last one, in order.

    What is `put` is handed on by `deliver`: to `push` at once, if there is one and it takes the batch, which
    saves the reader's task a turn of the event loop; else to the iteration.

    | state | event             | next                                                                  |
    |-------|-------------------|-----------------------------------------------------------------------|
    | open  | put               | open                                                                  |
    | open  | deliver           | open; `on_overflow` if over `limit` bytes wait and no reader for them |
    | open  | end, fail         | ended: what waits is still read, then StopAsyncIteration or the error |
    | open  | close (by reader) | ended: `on_close` is called                                           |
    | ended | any               | ended                                                                 |
    """

    def __init__(
        self,
        limit: int,
        *,
        usage: Callable[[], Usage],
        timing: Callable[[], Timing],
        on_overflow: Callable[[], None],
        on_close: Callable[[], None],
    ) -> None:
        self._usage = usage
        self._timing = timing
        self._limit = limit
        self._on_overflow = on_overflow
        self._on_close = on_close
        self._waiting: Batch = []
        self._num_weighed = 0
        self._unread = 0
        """Bytes that the first `_num_weighed` of the waiting deltas take."""
        self._listening = False
        """The reader waits here: what it has not taken yet, it had no turn to take."""
        self._error: GalleyError | None = None
        self._ended = False
        self._news = asyncio.Event()
        self.on_lost: Callable[[], None] | None = None
        """Called when the reader was too slow: it may hang in a write that only this can end."""
        self.push: Callable[[Batch], bool] | None = None
        """Takes a batch without waiting, or says that it cannot now. Not called any more once ended."""

    @property
    def usage(self) -> Usage:
        """Counts so far; complete once the iteration has ended."""
        return self._usage()

    @property
    def timing(self) -> Timing:
        """What is known so far; complete once the last choice has finished."""
        return self._timing()

    def put(self, delta: Delta) -> None:
        if not self._ended:
            self._waiting.append(delta)

    def deliver(self) -> None:
        """Hand on what was put; after the last of several puts."""
        if not self._waiting:
            return
        if self.push is not None and not self._ended and self.push(self._waiting):
            self._waiting = []
            return
        self._news.set()
        self._unread += sum(delta.num_bytes for delta in self._waiting[self._num_weighed :])
        self._num_weighed = len(self._waiting)
        if self._unread > self._limit and not self._listening and not self._ended:
            self._on_overflow()

    def end(self) -> None:
        self._ended = True
        self._news.set()

    def fail(self, error: GalleyError) -> None:
        if not self._ended:
            self._error = error
            self.end()

    def lose(self, error: GalleyError) -> None:
        """The reader is too slow: drop what it has not read and wake it wherever it hangs."""
        self._waiting.clear()
        self.fail(error)
        if self.on_lost is not None:
            self.on_lost()

    def close(self) -> None:
        """The reader goes away; what is still running for it is aborted. Idempotent."""
        if not self._ended:
            self._on_close()
            self.fail(Cancelled("the reader went away"))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Batch:
        """Raises the error that ended the request, after everything that came before it."""
        while not self._waiting:
            if self._error is not None:
                raise self._error
            if self._ended:
                raise StopAsyncIteration
            self._news.clear()
            self._listening = True
            try:
                await self._news.wait()  # the request's deadline ends it
            finally:
                self._listening = False
        batch, self._waiting = self._waiting, []
        self._num_weighed = self._unread = 0
        return batch
