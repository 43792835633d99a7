"""Server-sent events to one client: one write per batch, and a client that does not read is not waited for.

Knows nothing of what the events say.
"""

import asyncio
import socket
from collections.abc import Awaitable, Iterable

import orjson
from aiohttp import HttpVersion11, web

DONE = b"data: [DONE]\n\n"
SEND_BUFFER = 32 * 1024
"""Bytes that the kernel is asked to hold for a slow reader, before it is noticed; it takes twice that."""
STALL_S = 60.0
"""How long one write may wait for a client that does not read."""


def event(body: object) -> bytes:
    """One data line; JSON escapes newlines, so a body is always one event."""
    return b"data: " + orjson.dumps(body) + b"\n\n"


def named_event(name: str, body: object) -> bytes:
    """An event that says its kind on a line of its own."""
    return b"event: " + name.encode() + b"\n" + event(body)


class EventStream:
    """The response of one streamed request. `begin` sends the headers; what does not need the first token is
    done before, so an EventStream is best made before it is known what to send.

    `write` waits for the client, `send` never does: it is for a stream that is `free`, which it is between
    the first write and the end, while everything that was written is out.
    """

    def __init__(self, request: web.Request, headers: dict[str, str]) -> None:
        self._request = request
        self._response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
                **headers,
            }
        )
        if request.version >= HttpVersion11:
            self._response.enable_chunked_encoding()
        self._transport = request.transport
        """None where the client has gone already; one that goes later leaves it closing."""
        if self._transport is not None:
            _hold_little(self._transport)
        self._begun = False
        self._writing = False

    @property
    def free(self) -> bool:
        """Whether events can be sent without waiting, and after all that were written before."""
        transport = self._transport
        return (
            self._begun
            and not self._writing
            and transport is not None
            and not transport.is_closing()
            and not transport.get_write_buffer_size()
        )

    @property
    def response(self) -> web.StreamResponse:
        return self._response

    async def begin(self) -> None:
        await self._response.prepare(self._request)

    async def write(self, events: Iterable[bytes]) -> None:
        """Send events in one write; waits while the client does not read. Raises ConnectionError."""
        data = b"".join(events)
        if data:
            await self._unless_stalled(self._put(data))
            self._begun = True

    async def write_made(self, making: Awaitable[Iterable[bytes]]) -> None:
        """As `write`, of events that are still being made; the stream is not free meanwhile."""
        self._writing = True
        try:
            events = await making
        finally:
            self._writing = False
        await self.write(events)

    def send(self, events: Iterable[bytes]) -> None:
        """Send events in one write, as a chunk of our own: aiohttp's way takes a task and a timer."""
        data = b"".join(events)
        if data:
            assert self._transport is not None
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._response.chunked else data)

    async def end(self, events: Iterable[bytes]) -> None:
        """Send the last events and close the body."""
        await self.write(events)
        self._begun = False
        await self._unless_stalled(self._response.write_eof())

    async def _put(self, data: bytes) -> None:
        await self._response.write(data)
        await self._request.writer.drain()  # aiohttp itself lets 64 KiB wait in many small pieces

    async def _unless_stalled(self, writing: Awaitable[None]) -> None:
        self._writing = True
        try:
            async with asyncio.timeout(STALL_S):
                await writing
        except TimeoutError:
            self.cut()
            raise ConnectionError(f"the client has not read for {STALL_S:g} s") from None
        finally:
            self._writing = False

    def cut(self) -> None:
        """Drop the connection; a write that waits fails at once."""
        if self._transport is not None:
            self._transport.abort()


def _hold_little(transport: asyncio.Transport) -> None:
    """Let neither asyncio nor the kernel take much for a client that does not read."""
    # What the kernel does not take yet waits as one batch. Not 0: TLS takes that for always full.
    transport.set_write_buffer_limits(high=1, low=0)
    sock = transport.get_extra_info("socket")
    if sock is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
