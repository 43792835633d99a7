"""One endpoint to one exporter incarnation on the importer, shared by all pulls from it.

Connects, hands each control message to the pull it names, and when the endpoint breaks tells every pull
at once and closes it. Knows nothing of blocks.
"""

import asyncio
import contextlib
from typing import Protocol

from common.errors import KVPeerLost, KVTransferError
from common.kv.control_stream import ControlStream
from common.kv.wire import MAX_PULL_ID, WireMessage
from common.transport.kv import KVEndpoint, KVTransport


class Puller(Protocol):
    """What a link needs of a pull."""

    def handle(self, message: WireMessage) -> None: ...

    def lost(self, error: KVPeerLost) -> None: ...


class ImportLink:
    """A connection that its pulls share until it breaks; never used again after that.

    | state | event | next |
    |---|---|---|
    | connecting | connected | usable |
    | connecting | KVPeerLost, KVTimeout | closed |
    | usable | endpoint broken, protocol broken, fence | closing: every pull is told |
    | closing | endpoint closed | closed |
    """

    def __init__(self, transport: KVTransport, address: str, timeout_s: float) -> None:
        self._transport = transport
        self._address = address
        self._timeout_s = timeout_s
        self._endpoint: KVEndpoint | None = None
        self._stream: ControlStream | None = None
        self._settled = asyncio.Event()
        self._closed = asyncio.Event()
        self._fenced = asyncio.Event()
        self._error: KVTransferError | None = None
        self._pulls: dict[int, Puller] = {}
        self._next_pull = 1

    @property
    def usable(self) -> bool:
        """False once broken; a new link is needed then."""
        broken = self._error is not None or (self._endpoint is not None and not self._endpoint.alive)
        return not broken and self._next_pull <= MAX_PULL_ID

    @property
    def endpoint(self) -> KVEndpoint:
        assert self._endpoint is not None, "await connected() first"
        return self._endpoint

    async def connected(self) -> None:
        """Raises KVPeerLost, KVTimeout when the exporter cannot be reached."""
        await self._settled.wait()
        if self._error is not None:
            raise type(self._error)(self._error.message)

    async def closes_within(self, timeout_s: float) -> bool:
        """Whether the endpoint is closed by then, so that nothing writes through it any more."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._closed.wait()
        return self._closed.is_set()

    def join(self, puller: Puller) -> int:
        """A fresh pull id whose messages go to `puller`."""
        pull = self._next_pull
        self._next_pull += 1
        self._pulls[pull] = puller
        return pull

    def leave(self, pull: int) -> None:
        """Messages for `pull` are dropped from now on."""
        self._pulls.pop(pull, None)

    def post(self, message: WireMessage) -> None:
        """Raises KVPeerLost."""
        if self._stream is None or self._error is not None:
            raise KVPeerLost("the KV endpoint is closed")
        self._stream.post(message)

    def fence(self) -> None:
        """Close the endpoint; other pulls on it connect again."""
        self._fenced.set()

    async def run(self) -> None:
        """Connect, then dispatch until the endpoint breaks or is fenced; returns once it is closed."""
        try:
            self._endpoint = await self._transport.connect(self._address, self._timeout_s)
        except KVTransferError as error:
            self._error = error
            self._closed.set()
            return
        finally:
            self._settled.set()
        self._stream = ControlStream(self._endpoint)
        try:
            self._break(await self._dispatch(self._stream))
        finally:
            self._break(KVPeerLost("the KV link was closed"))
            await self._endpoint.close()
            self._closed.set()

    async def _dispatch(self, stream: ControlStream) -> KVTransferError:
        reading = asyncio.ensure_future(stream.run(self._handle))
        fenced = asyncio.ensure_future(self._fenced.wait())
        try:
            await asyncio.wait([reading, fenced], return_when=asyncio.FIRST_COMPLETED)
            return await reading if reading.done() else KVPeerLost("the KV link was fenced")
        finally:
            reading.cancel()
            fenced.cancel()
            await asyncio.gather(reading, fenced, return_exceptions=True)

    def _handle(self, message: WireMessage) -> None:
        pull = self._pulls.get(message.pull)
        if pull is not None:
            pull.handle(message)

    def _break(self, why: KVTransferError) -> None:
        if self._error is not None:
            return
        self._error = KVPeerLost(why.message)
        for pull in list(self._pulls.values()):
            pull.lost(KVPeerLost(why.message))
        self._pulls.clear()
