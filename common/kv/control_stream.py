"""Tag 0 of an endpoint as a stream of control messages, in both directions.

Posting never waits: one writer sends in the order posted, so that a header and its body stay together
even when the task that posted them is cancelled. Knows nothing of pulls and leases.
"""

import asyncio
from collections import deque
from collections.abc import Callable

from common.errors import KVPeerLost, KVTransferError, MessageInvalid
from common.kv.wire import CONTROL_TAG, HEADER_BYTES, WireMessage, decode_header, encode_header
from common.transport.kv import KVEndpoint

MAX_POSTED = 4096
"""Control messages waiting to be written; a peer that lets more pile up is not reading."""


class ControlStream:
    """Both directions of one endpoint's control messages; `run` must be running for anything to move."""

    def __init__(self, endpoint: KVEndpoint) -> None:
        self._endpoint = endpoint
        self._posted: deque[WireMessage] = deque()
        self._wake = asyncio.Event()

    def post(self, message: WireMessage) -> None:
        """Send in order, without waiting. Raises KVPeerLost when the endpoint is gone or far behind."""
        if not self._endpoint.alive:
            raise KVPeerLost("the KV endpoint is closed")
        if len(self._posted) >= MAX_POSTED:
            raise KVPeerLost(f"the peer has left {MAX_POSTED} control messages unread")
        self._posted.append(message)
        self._wake.set()

    async def run(self, handle: Callable[[WireMessage], None]) -> KVTransferError:
        """Write and read until the endpoint breaks; returns why it did.

        `handle` is called once per message, on the event loop, and may not wait. Cancelling stops both
        directions; the caller closes the endpoint.
        """
        tasks = [asyncio.ensure_future(self._write()), asyncio.ensure_future(self._read(handle))]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
        for task, end in zip(tasks, ends, strict=True):
            if task in done and isinstance(end, KVTransferError):
                return end
            if task in done and isinstance(end, MessageInvalid):
                return KVTransferError(f"the peer broke the protocol: {end.message}")
            if task in done and isinstance(end, BaseException):
                raise end
        return KVPeerLost("the KV endpoint is closed")

    async def _write(self) -> None:
        while True:
            while self._posted:
                message = self._posted.popleft()
                await self._endpoint.send(encode_header(message), CONTROL_TAG)
                if message.body:
                    await self._endpoint.send(message.body, CONTROL_TAG)
            self._wake.clear()
            await self._wake.wait()

    async def _read(self, handle: Callable[[WireMessage], None]) -> None:
        while True:
            header = bytearray(HEADER_BYTES)
            await self._endpoint.recv(header, CONTROL_TAG)
            message, body_bytes = decode_header(bytes(header))
            if body_bytes:
                body = bytearray(body_bytes)
                await self._endpoint.recv(body, CONTROL_TAG)
                message = WireMessage(message.kind, message.pull, message.first, message.count, bytes(body))
            handle(message)
