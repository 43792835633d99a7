"""The open loop: every request is sent at its time, however many still run, over a connection of its own.

Nothing is parsed while a stream runs (bench/stream_load.py), so that the client takes little of the cores
that it shares with those it measures. Times are the wall clock's, those of records in s since the load began.
"""

import asyncio
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Protocol
from urllib.parse import urlsplit

import orjson

from bench.records import RequestRecord, StreamLog, error_text
from bench.stream_load import Arrivals, RawStream, RefusedStream, completion_request, events_of
from bench.workloads import RequestSpec

CONNECT_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server that speaks OpenAI's completions, and the model to ask it for."""

    url: str
    model: str


class Watching(Protocol):
    """Who follows a load and may end it."""

    def ended(self, record: RequestRecord) -> None: ...

    def hopeless(self, running: Iterable[tuple[float, int]]) -> bool:
        """Whether no more need be sent; `running` are (age in s, output tokens) of requests under way."""
        ...


Limit = Callable[[RequestSpec], float]
"""s after its due time at which a request is given up."""


class OpenLoop:
    """One load on one or more servers, round robin. `run` it once."""

    def __init__(
        self, endpoints: Sequence[Endpoint], specs: Sequence[RequestSpec], watching: Watching, limit: Limit
    ) -> None:
        self._specs = specs
        self._watching = watching
        self._limit = limit
        self._arrivals = Arrivals()
        self._sending = [
            (
                endpoint,
                completion_request(endpoint.url, endpoint.model, spec.prompt, spec.max_tokens, usage=True),
            )
            for endpoint, spec in zip(cycle(endpoints), specs, strict=False)
        ]
        self._addresses = {endpoint.url: _address(endpoint.url) for endpoint in endpoints}
        self._running: dict[int, float] = {}
        self._began = 0.0

    async def run(self, arrivals: Sequence[float]) -> list[RequestRecord]:
        """Send request i `arrivals[i]` s (ascending) from now on; the records of those sent, in order."""
        self._began = time.time()
        tasks: list[asyncio.Task[RequestRecord]] = []
        async with asyncio.TaskGroup() as group:
            for number, due in enumerate(arrivals):
                await asyncio.sleep(self._began + due - time.time())
                if self._watching.hopeless(self._under_way()):
                    break
                tasks.append(group.create_task(self._one(number, due)))
        return [task.result() for task in tasks]

    def _under_way(self) -> Iterator[tuple[float, int]]:
        now = time.time() - self._began
        for number, due in self._running.items():
            yield now - due, self._specs[number].max_tokens

    async def _one(self, number: int, due: float) -> RequestRecord:
        spec, (endpoint, request) = self._specs[number], self._sending[number]
        sent = time.time() - self._began
        self._running[number] = due
        try:
            stream = await self._connect(endpoint.url)
            stream.send(request)
            await asyncio.wait([stream.ended], timeout=self._began + due + self._limit(spec) - time.time())
            given_up = "" if stream.ended.done() else "given up: later than any budget allows"
            stream.close()
            record = record_of(stream, spec, due=due, sent=sent, began=self._began, error=given_up)
        except OSError as error:  # TimeoutError is one
            ended = time.time() - self._began
            record = RequestRecord(due, sent, ended, error=f"{type(error).__name__}: {error}".rstrip(": "))
        finally:
            del self._running[number]
        self._watching.ended(record)
        return record

    async def _connect(self, url: str) -> RawStream:
        family, address = self._addresses[url]
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await asyncio.get_running_loop().sock_connect(sock, address)
        except BaseException:
            sock.close()
            raise
        return self._arrivals.watch(sock)


def _address(url: str) -> tuple[int, tuple[object, ...]]:
    """(family, address) of the server. Raises OSError for a host that nobody knows."""
    parts = urlsplit(url)
    family, _, _, _, address = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_STREAM)[
        0
    ]
    return family, address


def record_of(
    stream: RawStream, spec: RequestSpec, *, due: float, sent: float, began: float, error: str = ""
) -> RequestRecord:
    """What came over `stream`; an answer of another length than was asked for is an error."""
    log, status = StreamLog(), 200
    ended = (stream.times[-1] if stream.times else time.time()) - began
    try:
        for arrived, payload in events_of(stream):
            log.add(arrived - began, payload)
    except RefusedStream as refusal:
        status, error = refusal.status, error or _refusal(refusal)
    record = log.record(due=due, sent=sent, ended=ended, status=status, error=error)
    if record.ok and record.output_tokens != spec.max_tokens:
        wrong = f"{record.output_tokens} of {spec.max_tokens} tokens came"
        return log.record(due=due, sent=sent, ended=ended, status=status, error=wrong)
    return record


def _refusal(refusal: RefusedStream) -> str:
    if not refusal.answer:
        return "no answer"
    try:
        return f"{refusal.status}: {error_text(orjson.loads(refusal.body)['error'])}"
    except (ValueError, LookupError, TypeError):
        return f"{refusal.status}: {refusal.body[:200].decode(errors='replace')}"
