"""A bounded buffer between publishers that cannot wait and the one task that writes.

Bounded in bytes; what does not fit is the caller's to count and to drop, because whoever sends repairs.
Knows nothing of the wire.
"""

import asyncio
from collections import deque
from typing import NamedTuple

_OVERHEAD = 64
"""Bytes that one message costs beyond its payload, so that empty ones are bounded too."""


class Publication(NamedTuple):
    subject: str
    payload: bytes
    reply: str


class Outgoing:
    """First in, first out; `get` and `done` belong to one writer."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._queue: deque[Publication] = deque()
        self._filled = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        self.num_dropped = 0

    def put(self, subject: str, payload: bytes, reply: str) -> bool:
        """Append, or return False when it does not fit."""
        size = len(payload) + _OVERHEAD
        if self._bytes + size > self._max_bytes:
            return False
        self._bytes += size
        self._queue.append(Publication(subject, payload, reply))
        self._filled.set()
        self._empty.clear()
        return True

    async def get(self) -> Publication:
        """The oldest; it stays in the buffer until `done`."""
        while not self._queue:
            self._filled.clear()
            await self._filled.wait()
        return self._queue[0]

    def done(self) -> None:
        """The one last got has been written."""
        if self._queue:
            self._bytes -= len(self._queue.popleft().payload) + _OVERHEAD
        if not self._queue:
            self._empty.set()

    def clear(self) -> None:
        """Drop all that was not written."""
        self.num_dropped += len(self._queue)
        self._queue.clear()
        self._bytes = 0
        self._empty.set()

    async def emptied(self) -> None:
        """Wait until everything put so far has been written."""
        await self._empty.wait()
