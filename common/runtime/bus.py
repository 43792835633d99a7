"""The typed message bus: messages in, messages out, over any control transport.

Encodes, decodes, and carries requests over the bus's payload limit in parts. A payload that cannot be
read, or a handler that fails, is logged and counted and stops nobody. Knows nothing of what the
messages mean.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, overload

import structlog

from common.errors import ControlTimeout, MessageInvalid, PayloadTooLarge
from common.ids import IdSource, SystemIds
from common.messages.codec import decode, encode
from common.messages.subjects import Subjects
from common.observability.metrics import ServiceMetrics
from common.runtime.parts import Part, PartAck, PartRefused, Reassembly, is_part, pack, split, unpack
from common.transport.control import ControlTransport, Incoming, Subscription

A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
Reply = Callable[[object], None]
"""Answers the message at hand; may be called later, once. Without effect for a plain publish."""

log = structlog.get_logger()


@dataclass(slots=True, eq=False)
class Endpoint:
    """One subscription and what came of its messages; `handler_s` is the time spent in its handler."""

    subject: str
    queue: str
    num_messages: int = 0
    num_errors: int = 0
    last_error: str = ""
    handler_s: float = 0.0

    def failed(self, error: Exception) -> None:
        self.num_errors += 1
        self.last_error = f"{type(error).__name__}: {error}"


@dataclass(slots=True, eq=False)
class BusSubscription:
    endpoint: Endpoint
    _endpoints: list[Endpoint]
    _inner: Subscription

    async def unsubscribe(self) -> None:
        if self.endpoint in self._endpoints:
            self._endpoints.remove(self.endpoint)
        await self._inner.unsubscribe()


class MessageBus:
    """Publish, request and subscribe with message objects."""

    def __init__(self, transport: ControlTransport, subjects: Subjects, ids: IdSource | None = None) -> None:
        self.subjects = subjects
        self.transport = transport
        self.num_invalid = 0
        """Payloads that were not a message of the kinds expected."""
        self.num_handler_errors = 0
        self.endpoints: list[Endpoint] = []
        """What is subscribed now, for discovery and statistics (runtime/micro.py)."""
        self._ids = ids or SystemIds()
        self._reassembly = Reassembly()
        self._metrics: ServiceMetrics | None = None

    @property
    def connected(self) -> bool:
        return self.transport.connected

    def on_state(self, listener: Callable[[bool], None]) -> None:
        """Call `listener(connected)` whenever the bus is lost or back."""
        self.transport.on_state(listener)

    def report_to(self, metrics: ServiceMetrics) -> None:
        """Show there whether the bus can be used, and count what arrives and makes no sense."""
        self._metrics = metrics
        metrics.control_connected.set_function(lambda: float(self.connected))

    async def connect(self, stopping: asyncio.Event | None = None) -> bool:
        """First connect; tries until it succeeds, or gives False once `stopping` is set."""
        connecting = asyncio.ensure_future(self.transport.connect())
        waits: set[asyncio.Future[Any]] = {connecting}
        if stopping is not None:
            waits.add(asyncio.ensure_future(stopping.wait()))
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if connecting.done():
                connecting.result()
            return connecting.done()
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    def publish(self, subject: str, message: object) -> None:
        """Send without an answer; may be lost. Raises PayloadTooLarge: the sender splits, not the bus."""
        self.transport.publish(subject, encode(message))

    @overload
    async def request(self, subject: str, message: object, a: type[A], /, *, timeout_s: float) -> A: ...

    @overload
    async def request(
        self, subject: str, message: object, a: type[A], b: type[B], /, *, timeout_s: float
    ) -> A | B: ...

    async def request(self, subject: str, message: object, *replies: type, timeout_s: float) -> object:
        """Send and wait for one answer, which is one of `replies`.

        Raises NoResponders at once when nobody listens, ControlTimeout, ControlDisconnected, and
        MessageInvalid for an answer of another kind. A message over the payload limit travels in parts
        within the same `timeout_s`.
        """
        payload = encode(message)
        if len(payload) > self.transport.max_payload:
            payload = await self._send_parts(subject, payload, timeout_s)
        else:
            payload = await self.transport.request(subject, payload, timeout_s)
        return decode(payload, *replies)

    @overload
    async def subscribe(
        self, subject: str, handler: Callable[[A, Reply], None], a: type[A], /, *, queue: str = ""
    ) -> BusSubscription: ...

    @overload
    async def subscribe(
        self,
        subject: str,
        handler: Callable[[A | B, Reply], None],
        a: type[A],
        b: type[B],
        /,
        *,
        queue: str = "",
    ) -> BusSubscription: ...

    @overload
    async def subscribe(
        self,
        subject: str,
        handler: Callable[[A | B | C, Reply], None],
        a: type[A],
        b: type[B],
        c: type[C],
        /,
        *,
        queue: str = "",
    ) -> BusSubscription: ...

    async def subscribe(
        self, subject: str, handler: Callable[..., None], *kinds: type, queue: str = ""
    ) -> BusSubscription:
        """Call `handler(message, reply)` for every message of `kinds`; it may only note down or enqueue."""
        endpoint = Endpoint(subject, queue)
        loop = asyncio.get_running_loop()

        def receive(incoming: Incoming) -> None:
            started = loop.time()
            endpoint.num_messages += 1
            try:
                self._receive(incoming, handler, kinds)
            except MessageInvalid as error:
                self.num_invalid += 1
                if self._metrics is not None:
                    self._metrics.messages_invalid.inc()
                endpoint.failed(error)
                log.warning("message invalid", subject=incoming.subject, error=error.message)
            except Exception as error:
                self.num_handler_errors += 1
                endpoint.failed(error)
                log.exception("message handler failed", subject=incoming.subject)
            endpoint.handler_s += loop.time() - started

        inner = await self.transport.subscribe(subject, receive, queue)
        self.endpoints.append(endpoint)
        return BusSubscription(endpoint, self.endpoints, inner)

    async def close(self) -> None:
        await self.transport.close()

    def _receive(self, incoming: Incoming, handler: Callable[..., None], kinds: tuple[type, ...]) -> None:
        payload = incoming.payload
        if is_part(payload):
            part, data = unpack(payload)
            outcome = self._reassembly.add(part, data, asyncio.get_running_loop().time())
            if not isinstance(outcome, bytes):
                self._reply(incoming, outcome)
                return
            payload = outcome
        handler(decode(payload, *kinds), lambda answer: self._reply(incoming, answer))

    def _reply(self, incoming: Incoming, answer: object) -> None:
        payload = encode(answer)
        if len(payload) > self.transport.max_payload:
            log.error("reply too large", subject=incoming.subject, size=len(payload))
            return
        incoming.reply(payload)

    async def _send_parts(self, subject: str, payload: bytes, timeout_s: float) -> bytes:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        pieces = split(payload, self.transport.max_payload)
        message_id = self._ids.hex()
        for index, piece in enumerate(pieces):
            left = deadline - loop.time()
            if left <= 0:
                raise ControlTimeout(f"{index} of {len(pieces)} parts on {subject} within {timeout_s} s")
            part = pack(Part(message_id, index, len(pieces)), piece)
            answer = await self.transport.request(subject, part, left)
            if index == len(pieces) - 1:
                break
            if isinstance(decode(answer, PartAck, PartRefused), PartRefused):
                raise PayloadTooLarge(f"{subject} does not take a message of {len(payload)} bytes")
        return answer
