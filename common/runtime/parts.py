"""Messages over the bus's payload limit, cut into parts and put together again.

A part is one line of JSON (Part) followed by its slice of the message's bytes; each part is a request
of its own, answered PartAck or PartRefused, and the last one by the answer to the whole message. Pure:
knows nothing of transports, and time comes in as an argument.
"""

from dataclasses import dataclass, field
from typing import ClassVar

from common.errors import MessageInvalid
from common.messages.codec import decode, encode

_MARK = b"part "
_HEADER_ROOM = 256
"""Bytes of each part kept for mark and header: an id, two numbers, JSON around them."""


@dataclass(frozen=True, slots=True)
class Part:
    """Part `index` of `count` of message `message`; indexes arrive in order, from 0."""

    KIND: ClassVar[str] = "part"
    message: str
    index: int
    count: int


@dataclass(frozen=True, slots=True)
class PartAck:
    """This part is in; send the next."""

    KIND: ClassVar[str] = "part.ok"


@dataclass(frozen=True, slots=True)
class PartRefused:
    """Not taken: over the limit, or an earlier part is missing. The message must be sent anew."""

    KIND: ClassVar[str] = "part.refused"


def split(payload: bytes, max_payload: int) -> list[bytes]:
    """Slices that fit into `max_payload` bytes together with their header."""
    size = max_payload - _HEADER_ROOM
    return [payload[start : start + size] for start in range(0, len(payload), size)]


def pack(part: Part, data: bytes) -> bytes:
    return _MARK + encode(part) + b"\n" + data


def is_part(payload: bytes) -> bool:
    return payload.startswith(_MARK)


def unpack(payload: bytes) -> tuple[Part, bytes]:
    """Raises MessageInvalid."""
    header, found, data = payload.partition(b"\n")
    if not found:
        raise MessageInvalid("a part without its header line")
    return decode(header[len(_MARK) :], Part), data


@dataclass(slots=True)
class _Unfinished:
    touched: float
    pieces: list[bytes] = field(default_factory=list)
    size: int = 0


class Reassembly:
    """Messages of which parts have arrived; bounded in bytes, and forgotten after `idle_s` of silence."""

    def __init__(self, max_bytes: int = 64 << 20, idle_s: float = 10.0) -> None:
        self._max_bytes = max_bytes
        self._idle_s = idle_s
        self._size = 0
        self._unfinished: dict[str, _Unfinished] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes held for messages that are not complete."""
        return self._size

    def add(self, part: Part, data: bytes, now: float) -> bytes | PartAck | PartRefused:
        """Take one part: the whole message after the last one, else how to answer this part."""
        self._forget_idle(now)
        if part.index == 0:
            self._forget(part.message)
            self._unfinished[part.message] = _Unfinished(now)
        message = self._unfinished.get(part.message)
        if message is None or part.index != len(message.pieces):
            self._forget(part.message)
            return PartRefused()
        if self._size + len(data) > self._max_bytes:
            self._forget(part.message)
            return PartRefused()
        message.pieces.append(data)
        message.touched = now
        message.size += len(data)
        self._size += len(data)
        if len(message.pieces) < part.count:
            return PartAck()
        self._forget(part.message)
        return b"".join(message.pieces)

    def _forget_idle(self, now: float) -> None:
        idle = [name for name, m in self._unfinished.items() if now - m.touched > self._idle_s]
        for name in idle:
            self._forget(name)

    def _forget(self, name: str) -> None:
        message = self._unfinished.pop(name, None)
        if message is not None:
            self._size -= message.size
