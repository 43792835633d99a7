"""The data plane inside one process: endpoints that copy from one buffer into the other.

For tests and simulators: the semantics of transport/kv.py and of UCX as we use it, including what hurts.
A small message is buffered by the sender's side, a large one is done only when it was received; a
cancelled receive still takes its message; a broken endpoint loses whatever was not received. Waits only
on the event loop, so a virtual-time loop works. Knows nothing of leases and blocks.
"""

import asyncio
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass

from common.errors import KVPeerLost, KVTransferError
from common.transport.kv import Buffer, KVEndpoint, OnEndpoint

EAGER_BYTES = 8192


@dataclass(eq=False, slots=True)
class _Half:
    """A send or a receive waiting for its other half, or for the copy to end."""

    view: memoryview
    done: asyncio.Future[None]


class InprocEndpoint:
    """One side of a connection; `peer` is the other."""

    def __init__(self, delay_s: Callable[[int], float]) -> None:
        self.peer: InprocEndpoint | None = None
        self._delay_s = delay_s
        self._alive = True
        self._sent: defaultdict[int, deque[_Half]] = defaultdict(deque)
        self._wanted: defaultdict[int, deque[_Half]] = defaultdict(deque)
        self._copying: set[asyncio.Future[None]] = set()
        self._timers: set[asyncio.TimerHandle] = set()

    @property
    def alive(self) -> bool:
        return self._alive

    async def send(self, buffer: Buffer, tag: int) -> None:
        self._check()
        view = _bytes_of(buffer)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if view.nbytes <= EAGER_BYTES:
            view = memoryview(bytes(view))
            done.set_result(None)
        peer = self.peer
        assert peer is not None
        peer._sent[tag].append(_Half(view, done))
        peer._match(tag)
        await asyncio.shield(done)

    async def recv(self, buffer: Buffer, tag: int) -> None:
        self._check()
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._wanted[tag].append(_Half(_bytes_of(buffer), done))
        self._match(tag)
        await asyncio.shield(done)

    async def close(self) -> None:
        """The fence is immediate here: nothing is copied once an endpoint is broken."""
        self.lose("the KV endpoint was closed")
        await asyncio.sleep(0)

    def lose(self, why: str) -> None:
        """Break the connection at once, on both sides, as when a process dies."""
        for side in (self, self.peer):
            if side is not None and side._alive:
                side._break(why)

    def _check(self) -> None:
        if not self._alive:
            raise KVPeerLost("the KV endpoint is closed")

    def _break(self, why: str) -> None:
        self._alive = False
        for timer in self._timers:
            timer.cancel()
        waiting = [half.done for queue in (*self._sent.values(), *self._wanted.values()) for half in queue]
        for done in (*waiting, *self._copying):
            _fail(done, KVPeerLost(why))
        self._sent.clear()
        self._wanted.clear()
        self._copying.clear()

    def _match(self, tag: int) -> None:
        sent, wanted = self._sent[tag], self._wanted[tag]
        while sent and wanted:
            self._start(sent.popleft(), wanted.popleft())
        if not sent:
            del self._sent[tag]
        if not wanted:
            del self._wanted[tag]

    def _start(self, source: _Half, target: _Half) -> None:
        delay_s = self._delay_s(source.view.nbytes)
        if delay_s <= 0:
            _copy(source, target)
            return
        self._copying |= {source.done, target.done}

        def finish() -> None:
            self._timers.discard(timer)
            self._copying -= {source.done, target.done}
            _copy(source, target)

        timer = asyncio.get_running_loop().call_later(delay_s, finish)
        self._timers.add(timer)


class InprocHub:
    """The machine: addresses, and who listens on them."""

    def __init__(self, delay_s: Callable[[int], float] = lambda _nbytes: 0.0) -> None:
        """`delay_s` gives the seconds that a message of so many bytes travels."""
        self.delay_s = delay_s
        self._listening: dict[str, InprocTransport] = {}
        self._next = 1

    def transport(self) -> "InprocTransport":
        """The transport of one more process."""
        self._next += 1
        return InprocTransport(self, f"inproc-{self._next - 1}")

    def find(self, address: str) -> "InprocTransport | None":
        return self._listening.get(address)

    def announce(self, transport: "InprocTransport") -> None:
        self._listening[transport.address] = transport

    def forget(self, transport: "InprocTransport") -> None:
        self._listening.pop(transport.address, None)


class InprocTransport:
    """KVTransport within one process."""

    def __init__(self, hub: InprocHub, address: str) -> None:
        self._hub = hub
        self._address = address
        self._on_endpoint: OnEndpoint | None = None
        self._endpoints: list[InprocEndpoint] = []
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def name(self) -> str:
        return "inproc"

    @property
    def address(self) -> str:
        return self._address

    async def listen(self, on_endpoint: OnEndpoint) -> None:
        self._on_endpoint = on_endpoint
        self._hub.announce(self)

    async def connect(self, address: str, timeout_s: float) -> KVEndpoint:
        del timeout_s  # the answer is known at once here
        await asyncio.sleep(0)
        peer = self._hub.find(address)
        if peer is None:
            raise KVPeerLost(f"nobody listens on {address}")
        ours, theirs = InprocEndpoint(self._hub.delay_s), InprocEndpoint(self._hub.delay_s)
        ours.peer, theirs.peer = theirs, ours
        self._endpoints = [e for e in self._endpoints if e.alive] + [ours]
        peer._accept(theirs)
        return ours

    def kill(self) -> None:
        """Die like a process: every peer loses its endpoint, nobody listens any more."""
        self._hub.forget(self)
        for endpoint in self._endpoints:
            endpoint.lose("the peer's process died")
        self._endpoints.clear()

    async def close(self) -> None:
        self.kill()
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, endpoint: InprocEndpoint) -> None:
        self._endpoints = [e for e in self._endpoints if e.alive] + [endpoint]
        task = asyncio.get_running_loop().create_task(self._serve(endpoint))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, endpoint: InprocEndpoint) -> None:
        assert self._on_endpoint is not None
        try:
            await self._on_endpoint(endpoint)
        finally:
            await endpoint.close()


def _bytes_of(buffer: Buffer) -> memoryview:
    return memoryview(buffer).cast("B")  # type: ignore[arg-type]


def _copy(source: _Half, target: _Half) -> None:
    size = source.view.nbytes
    if size > target.view.nbytes:
        _fail(target.done, KVTransferError(f"a message of {size} bytes for {target.view.nbytes}"))
    else:
        target.view[:size] = source.view
        if size < target.view.nbytes:
            _fail(target.done, KVTransferError(f"a message of {size} bytes, expected {target.view.nbytes}"))
        elif not target.done.done():
            target.done.set_result(None)
    if not source.done.done():
        source.done.set_result(None)


def _fail(done: asyncio.Future[None], error: KVTransferError) -> None:
    if not done.done():
        done.set_exception(error)
        done.exception()  # a cancelled waiter will not fetch it; that is no error of its own
