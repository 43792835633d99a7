"""The control transport inside one process: for tests and simulation, under any event loop.

Behaves as NATS does where services can tell: at most once, asynchronous, ordered, queue groups, prompt
NoResponders, a payload limit, a bus that goes away and comes back. A `Fate` decides what the network does
to each message. Knows nothing of messages; bytes in, bytes out.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from common.errors import ControlDisconnected, ControlTimeout, NoResponders, PayloadTooLarge
from common.transport.control import Handler, StateListener

Fate = Callable[[str, bytes], float | None]
"""(subject, payload) -> seconds until it arrives, or None for lost. A reply to a request on `s` has the
subject `_INBOX.s`. Unequal delays break the order that a real bus keeps: that is the caller's wish."""


def at_once(_subject: str, _payload: bytes) -> float | None:
    """The fate of every message on a healthy bus."""
    return 0.0


class MemoryHub:
    """The bus: routes between its clients. `stop` and `start` are a server's outage and return."""

    def __init__(self, fate: Fate = at_once, *, max_payload: int = 1 << 20) -> None:
        self.fate = fate
        self.max_payload = max_payload
        self.up = True
        self._clients: list[MemoryTransport] = []
        self._members: dict[str, list[MemorySubscription]] = {}
        self._turns: dict[tuple[str, str], int] = {}

    def client(self) -> "MemoryTransport":
        """A new client, not yet connected."""
        client = MemoryTransport(self)
        self._clients.append(client)
        return client

    def stop(self) -> None:
        """The server goes away: every client is disconnected, their subscriptions are kept."""
        self.up = False
        for client in self._clients:
            client.disconnect()

    def start(self) -> None:
        """The server is back: every client that was connected before reconnects."""
        self.up = True
        for client in self._clients:
            client.reconnect()

    def join(self, member: "MemorySubscription") -> None:
        self._members.setdefault(member.subject, []).append(member)

    def leave(self, member: "MemorySubscription") -> None:
        members = self._members.get(member.subject, [])
        if member in members:
            members.remove(member)

    def carry(self, subject: str, payload: bytes, asker: "Asker | None") -> None:
        """Take one message from a client; it reaches the subscribers of the moment when it arrives."""
        self.after_fate(subject, payload, lambda: self._arrive(subject, payload, asker))

    def after_fate(self, subject: str, payload: bytes, arrive: Callable[[], None]) -> None:
        delay = self.fate(subject, payload)
        if delay is None:
            return
        loop = asyncio.get_running_loop()
        if delay > 0:
            loop.call_later(delay, arrive)
        else:
            loop.call_soon(arrive)

    def _arrive(self, subject: str, payload: bytes, asker: "Asker | None") -> None:
        members = [m for m in self._members.get(subject, ()) if m.client.connected]
        if not members and asker is not None:
            asker.fail(NoResponders(f"nobody listens on {subject}"))
        groups: dict[str, list[MemorySubscription]] = {}
        for member in members:
            groups.setdefault(member.queue, []).append(member)
        for queue, group in groups.items():
            for member in group if not queue else (self._next_of(subject, queue, group),):
                member.handler(MemoryIncoming(subject, payload, member.client, asker))

    def _next_of(self, subject: str, queue: str, group: "list[MemorySubscription]") -> "MemorySubscription":
        turn = self._turns.get((subject, queue), 0)
        self._turns[subject, queue] = turn + 1
        return group[turn % len(group)]


class MemoryTransport:
    """One client of a MemoryHub (see transport/control.py)."""

    def __init__(self, hub: MemoryHub) -> None:
        self._hub = hub
        self._connected = False
        self._wants_connection = False
        self._back = asyncio.Event()
        self._listeners: list[StateListener] = []
        self._subscriptions: list[MemorySubscription] = []
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._requests = 0

    @property
    def connected(self) -> bool:
        return self._connected

    @property
    def max_payload(self) -> int:
        return self._hub.max_payload

    def on_state(self, listener: StateListener) -> None:
        self._listeners.append(listener)

    async def connect(self) -> None:
        self._wants_connection = True
        if self._hub.up:
            self.reconnect()
        await self._back.wait()

    def disconnect(self) -> None:
        """This client alone loses the bus until `reconnect`; its pending requests fail."""
        self._back.clear()
        self._set_connected(False)
        for waiting in list(self._waiting.values()):
            _fail(waiting, ControlDisconnected("the connection to the bus was lost"))

    def reconnect(self) -> None:
        """Back on the bus, if it is up and this client had asked to connect."""
        if self._wants_connection and self._hub.up:
            self._set_connected(True)
            self._back.set()

    def kill(self) -> None:
        """The process behind this client dies: nobody is listening here any more, for good."""
        self._wants_connection = False
        for member in self._subscriptions:
            self._hub.leave(member)
        self._subscriptions.clear()
        self.disconnect()

    def publish(self, subject: str, payload: bytes) -> None:
        self._check_size(payload)
        if self._connected:
            self._hub.carry(subject, payload, None)

    async def request(self, subject: str, payload: bytes, timeout_s: float) -> bytes:
        self._check_size(payload)
        if not self._connected:
            raise ControlDisconnected("the bus is not connected")
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._requests += 1
        number = self._requests
        self._waiting[number] = answer
        try:
            self._hub.carry(subject, payload, Asker(self._hub, subject, answer))
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            raise ControlTimeout(f"no answer on {subject} within {timeout_s} s") from None
        finally:
            del self._waiting[number]

    async def subscribe(self, subject: str, handler: Handler, queue: str = "") -> "MemorySubscription":
        if not self._wants_connection:
            raise ControlDisconnected("connect before subscribing")
        member = MemorySubscription(self, subject, handler, queue)
        self._subscriptions.append(member)
        self._hub.join(member)
        return member

    def drop(self, member: "MemorySubscription") -> None:
        if member in self._subscriptions:
            self._subscriptions.remove(member)
        self._hub.leave(member)

    async def close(self) -> None:
        self.kill()

    def _check_size(self, payload: bytes) -> None:
        if len(payload) > self.max_payload:
            raise PayloadTooLarge(f"{len(payload)} bytes are over the bus's limit of {self.max_payload}")

    def _set_connected(self, connected: bool) -> None:
        if connected == self._connected:
            return
        self._connected = connected
        for listener in self._listeners:
            listener(connected)


@dataclass(slots=True, eq=False)
class MemorySubscription:
    client: MemoryTransport
    subject: str
    handler: Handler
    queue: str

    async def unsubscribe(self) -> None:
        self.client.drop(self)


@dataclass(slots=True)
class Asker:
    """Where the answer of one request goes; only the first one counts."""

    hub: MemoryHub
    subject: str
    answer: asyncio.Future[bytes]

    def deliver(self, payload: bytes) -> None:
        self.hub.after_fate(f"_INBOX.{self.subject}", payload, lambda: self._resolve(payload))

    def fail(self, error: Exception) -> None:
        _fail(self.answer, error)

    def _resolve(self, payload: bytes) -> None:
        if not self.answer.done():
            self.answer.set_result(payload)


@dataclass(frozen=True, slots=True)
class MemoryIncoming:
    subject: str
    payload: bytes
    _client: MemoryTransport
    _asker: Asker | None

    def reply(self, payload: bytes) -> None:
        if self._asker is not None and self._client.connected:
            self._asker.deliver(payload)


def _fail(future: asyncio.Future[bytes], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
