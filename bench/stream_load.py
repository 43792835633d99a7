"""A load client for tens of thousands of events a second: raw sockets, and nothing is parsed while it runs.

Every stream is a connection that notes when which bytes came; `StreamRecord.of` reads them afterwards. What
came is what the kernel says is there when it is asked, for all streams at once: a stream does not look late
because another one was read first. Times are the wall clock's, in s, so that they compare with those of
another process on this machine.
"""

import asyncio
import select
import socket
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from urllib.parse import urlsplit

import orjson

CONNECT_TIMEOUT_S = 10.0
RECEIVE_BYTES = 16 * 1024
_LAST_CHUNK = b"0\r\n\r\n"


class RawStream:
    """One streamed request on a connection of its own. `ended` is done when its last byte came."""

    def __init__(self, send: Callable[[bytes], int], hang_up: Callable[[], None]) -> None:
        self.sent = 0.0
        self.pieces: list[bytes] = []
        self.times: list[float] = []
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._send = send
        self._hang_up = hang_up

    def send(self, request: bytes) -> None:
        """Raises OSError when the kernel does not take all of it."""
        self.sent = time.time()
        if self._send(request) < len(request):
            raise OSError("the request is longer than the connection takes at once")

    def received(self, data: bytes, at: float) -> None:
        """`data` was there at `at`; b"" is the connection's end."""
        if data:
            self.times.append(at)
            self.pieces.append(data)
        if not data or data.endswith(_LAST_CHUNK) or (len(data) < len(_LAST_CHUNK) and self._at_end()):
            self.close()

    def close(self) -> None:
        self._hang_up()
        if not self.ended.done():
            self.ended.set_result(None)

    def _at_end(self) -> bool:
        return b"".join(self.pieces[-len(_LAST_CHUNK) :]).endswith(_LAST_CHUNK)


class Arrivals:
    """Asks the kernel which of its streams have bytes, whenever some have, and reads those. Holds nothing
    while none of them is open."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._epoll: select.epoll
        self._open: dict[int, tuple[socket.socket, RawStream]] = {}

    def watch(self, sock: socket.socket) -> RawStream:
        """The stream on this connection, which is the stream's to close from now on."""
        if not self._open:
            self._epoll = select.epoll()
            self._loop.add_reader(self._epoll.fileno(), self._look)
        sock.setblocking(False)
        stream = RawStream(sock.send, partial(self._hang_up, sock))
        self._open[sock.fileno()] = sock, stream
        self._epoll.register(sock.fileno(), select.EPOLLIN)
        return stream

    def _look(self) -> None:
        ready = self._epoll.poll(0)
        now = time.time()
        for number, _ in ready:
            sock, stream = self._open[number]
            try:
                stream.received(sock.recv(RECEIVE_BYTES), now)
            except BlockingIOError:
                continue
            except OSError:
                stream.close()

    def _hang_up(self, sock: socket.socket) -> None:
        if self._open.pop(sock.fileno(), None) is None:
            return
        sock.close()
        if not self._open:
            self._loop.remove_reader(self._epoll.fileno())
            self._epoll.close()


@dataclass(frozen=True, slots=True)
class StreamRecord:
    """What came of a stream. `times` has when each event with text came; `error` is empty if all is well."""

    request: str
    sent: float
    times: tuple[float, ...]
    text: str
    error: str = ""

    @classmethod
    def of(cls, stream: RawStream) -> "StreamRecord":
        """Read what `stream` collected: status, chunks, events."""
        try:
            found = events_of(stream)
        except RefusedStream as refusal:
            return cls("", stream.sent, (), "", f"answered {refusal.answer!r}")
        times: list[float] = []
        texts: list[str] = []
        request, whole = "", False
        for arrived, payload in found:
            if payload == b"[DONE]":
                whole = True
                continue
            chunk = orjson.loads(payload)
            if "error" in chunk:
                return cls(request, stream.sent, tuple(times), "".join(texts), str(chunk["error"]))
            request = str(chunk["id"]).rpartition("-")[2]
            if chunk["choices"] and (text := chunk["choices"][0].get("text")):
                times.append(arrived)
                texts.append(text)
        return cls(request, stream.sent, tuple(times), "".join(texts), "" if whole else "broke off")


class RefusedStream(Exception):
    """Not 200, or nothing at all; `answer` is how it begins."""

    def __init__(self, answer: bytes) -> None:
        super().__init__(answer)
        self.answer = answer

    @property
    def status(self) -> int:
        """The HTTP status, 0 without one."""
        version, _, rest = self.answer.partition(b" ")
        return int(rest[:3]) if version.startswith(b"HTTP/") and rest[:3].isdigit() else 0

    @property
    def body(self) -> bytes:
        return self.answer.partition(b"\r\n\r\n")[2]


def events_of(stream: RawStream) -> list[tuple[float, bytes]]:
    """(arrival, payload) of each event of the stream's chunked body. Raises RefusedStream."""
    raw, ends = b"".join(stream.pieces), list(accumulate(map(len, stream.pieces)))
    if not raw.startswith(b"HTTP/1.1 200"):
        raise RefusedStream(raw[:1000])
    at = raw.find(b"\r\n\r\n") + 4
    found: list[tuple[float, bytes]] = []
    rest = b""
    while (line_end := raw.find(b"\r\n", at)) >= 0 and (size := int(raw[at:line_end], 16)):
        start = line_end + 2
        *events, rest = (rest + raw[start : start + size]).split(b"\n\n")
        arrived = stream.times[min(bisect_left(ends, start + size), len(ends) - 1)]
        found += [(arrived, event[6:]) for event in events if event.startswith(b"data: ")]
        at = start + size + 2
    return found


async def connect(url: str, count: int) -> list[RawStream]:
    """`count` connections to the server at `url`. Raises OSError, TimeoutError."""
    parts = urlsplit(url)
    address = (parts.hostname or "", parts.port or 80)
    arrivals, streams = Arrivals(), []
    for _ in range(count):
        sock = await asyncio.to_thread(socket.create_connection, address, CONNECT_TIMEOUT_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        streams.append(arrivals.watch(sock))
    return streams


async def finish(streams: Sequence[RawStream], timeout_s: float) -> list[StreamRecord]:
    """Wait for the ends of `streams`; what has not ended in time is closed, and shows as broken off."""
    await asyncio.wait([stream.ended for stream in streams], timeout=timeout_s)
    for stream in streams:
        stream.close()
    return [StreamRecord.of(stream) for stream in streams]


def completion_request(
    url: str, model: str, prompt: str | Sequence[int], max_tokens: int, *, usage: bool = False
) -> bytes:
    """The bytes of a streamed completion of exactly `max_tokens` tokens, with their count at its end if
    `usage`."""
    body = orjson.dumps(
        {
            "model": model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            **({"stream_options": {"include_usage": True}} if usage else {}),
        }
    )
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
