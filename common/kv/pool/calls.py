"""Calls of a blocking store from the event loop: in threads, bounded, each with a deadline.

A thread that hangs in a file system or a library cannot be stopped, so a call that is given up is left
behind, and what it must not do any more, touch the caller's memory, it has to ask for. Knows nothing of
what a store does.
"""

import asyncio
import contextlib
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial

from common.errors import KVPoolUnavailable
from common.kv.pool.base import PoolEvent, PoolMeter
from common.transport.kv import Buffer


class GivenUp(Exception):  # not an error
    """Nobody waits for this call any more."""


class Call:
    """One call. `done`: how many of the names are dealt with, in order. `due`: its deadline, in loop time."""

    def __init__(self, due: float) -> None:
        self.due = due
        self.done = 0
        self.events: Counter[PoolEvent] = Counter()
        self._lock = threading.Lock()
        self._given_up = threading.Event()

    def copy(self, target: memoryview, source: memoryview) -> None:
        """The only way to touch memory of the caller. Raises GivenUp."""
        with self._lock:
            self.check()
            target[:] = source

    def check(self) -> None:
        """Raises GivenUp."""
        if self._given_up.is_set():
            raise GivenUp

    def pause(self, seconds: float) -> None:
        """Raises GivenUp, at once when it happens."""
        if self._given_up.wait(seconds):
            raise GivenUp

    def give_up(self) -> None:
        """Once this returns, the caller's memory is not touched. Waits for one block's copy at most."""
        with self._lock:
            self._given_up.set()


def views(blocks: Seq[Buffer], block_bytes: int) -> list[memoryview]:
    """The bytes of host memory. Raises ValueError for a block that has not `block_bytes`."""
    found = [memoryview(block).cast("B") for block in blocks]  # type: ignore[arg-type]  # a Buffer
    if any(view.nbytes != block_bytes for view in found):
        raise ValueError(f"blocks of this pool have {block_bytes} bytes")
    return found


class PoolCalls:
    """Runs at most `threads` calls at once, each for at most `timeout_s` seconds from when it was asked for.

    While a call is in its thread after its deadline, given up or not, the store is taken to hang and further
    ones fail at once: whoever waits for the pool waits for one deadline, not for one a request.
    """

    def __init__(self, timeout_s: float, threads: int, meter: PoolMeter) -> None:
        self._timeout_s = timeout_s
        self._meter = meter
        self._free = asyncio.Semaphore(threads)
        self._running: dict[Call, asyncio.Future[None]] = {}
        self._closed = False

    async def run(self, work: Callable[[Call], None]) -> int:
        """What `work`, in a thread, has left in the call's `done` by its end or by the deadline.

        Raises KVPoolUnavailable: closed, hanging, an OSError, or nothing done by the deadline.
        """
        try:
            return await self._run(work)
        except KVPoolUnavailable:
            self._meter.unavailable()
            raise

    async def _run(self, work: Callable[[Call], None]) -> int:
        if self._closed:
            raise KVPoolUnavailable("the KV pool is closed")
        now = asyncio.get_running_loop().time()
        if any(now >= running.due for running in self._running):
            raise KVPoolUnavailable("the KV pool does not answer: an earlier call is still waiting for it")
        call = Call(now + self._timeout_s)
        try:
            async with asyncio.timeout_at(call.due):
                await self._free.acquire()
                await self._start(call, work)
        except TimeoutError:
            if not call.done:
                raise KVPoolUnavailable(f"the KV pool did not answer within {self._timeout_s:g} s") from None
        except OSError as error:
            raise KVPoolUnavailable(f"the KV pool failed: {error}") from error
        finally:
            call.give_up()
        return call.done

    async def close(self, leave: Callable[[], None] | None = None) -> None:
        """Wait for what runs, then for `leave` in a thread, each up to the deadline."""
        self._closed = True
        if self._running:
            await asyncio.wait(self._running.values(), timeout=self._timeout_s)
        if leave and not self._running:
            await self._free.acquire()
            call = Call(asyncio.get_running_loop().time() + self._timeout_s)
            await asyncio.wait([self._start(call, lambda _: leave())], timeout=self._timeout_s)

    def _start(self, call: Call, work: Callable[[Call], None]) -> "asyncio.Future[None]":
        loop = asyncio.get_running_loop()
        self._running[call] = ended = loop.create_future()

        def run() -> None:
            error: BaseException | None = None
            try:
                work(call)
            except GivenUp:
                pass
            except BaseException as raised:
                error = raised
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to be told
                loop.call_soon_threadsafe(self._ended, call, error)

        # A daemon, as a thread that hangs must not keep the process from ending.
        try:
            threading.Thread(target=run, name="kv-pool", daemon=True).start()
        except RuntimeError as error:
            self._ended(call, OSError(str(error)))
        return asyncio.shield(ended)

    def _ended(self, call: Call, error: BaseException | None) -> None:
        self._free.release()
        ended = self._running.pop(call)
        for event, blocks in call.events.items():
            self._meter.count(event, blocks)
        if error is not None:
            ended.set_exception(error)
            ended.exception()  # looked at, so that asyncio does not complain where nobody waits any more
        else:
            ended.set_result(None)


class BlockingPool(ABC):
    """The awaitable half of a KVPool whose store blocks: counting, deadlines, and memory for the calls.

    `_match`, `_load` and `_publish` run in one of the threads and count in `call.done`.
    """

    def __init__(self, block_bytes: int, calls: PoolCalls, meter: PoolMeter) -> None:
        self._block_bytes = block_bytes
        self._calls = calls
        self._meter = meter

    async def match(self, names: Seq[bytes]) -> int:
        """See KVPool."""
        matched = await self._calls.run(partial(self._match, names))
        self._meter.count("matched", matched)
        self._meter.count("unmatched", len(names) - matched)
        return matched

    async def load(self, names: Seq[bytes], blocks: Seq[Buffer]) -> int:
        """See KVPool."""
        loaded = await self._calls.run(partial(self._load, names, views(blocks, self._block_bytes)))
        self._meter.count("hit", loaded)
        self._meter.count("miss", len(names) - loaded)
        return loaded

    async def publish(self, names: Seq[bytes], blocks: Seq[Buffer]) -> int:
        """See KVPool."""
        return await self._calls.run(partial(self._publish, names, views(blocks, self._block_bytes)))

    @abstractmethod
    def _match(self, names: Seq[bytes], call: Call) -> None: ...

    @abstractmethod
    def _load(self, names: Seq[bytes], blocks: Seq[memoryview], call: Call) -> None: ...

    @abstractmethod
    def _publish(self, names: Seq[bytes], blocks: Seq[memoryview], call: Call) -> None: ...
