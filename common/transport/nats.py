"""The control transport over core NATS.

A connection is never repaired, only replaced: when one is lost for whatever reason, a fresh client is
connected and every subscription made anew on it, for ever. Publishing only appends to a bounded outgoing
buffer that one task per connection writes out. Knows nothing of messages; bytes in, bytes out.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress

import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as WireSubscription
from nats.errors import Error, SlowConsumerError

from common.errors import (
    ConfigError,
    ControlDisconnected,
    ControlError,
    ControlTimeout,
    NoResponders,
    PayloadTooLarge,
)
from common.transport.control import Handler, StateListener
from common.transport.outgoing import Outgoing

DEFAULT_MAX_PAYLOAD = 1 << 20
"""What nats-server allows unless told otherwise; the real limit is known once connected."""
_PING_S, _PINGS_MISSED = 5, 2
_CONNECT_TIMEOUT_S = 2
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0
_CLOSE_TIMEOUT_S = 2.0
_PENDING_MESSAGES, _PENDING_BYTES = 512 * 1024, 128 * 1024 * 1024

log = structlog.get_logger()


class NatsTransport:
    """One client of a NATS server or cluster (see transport/control.py).

    | state | becomes | when |
    |---|---|---|
    | new | connecting | `connect` |
    | connecting | connected | a server answered and knows all subscriptions |
    | connected | connecting | the connection was lost: pending requests fail, unsent publishes are dropped |
    | any | closed | `close`: what was published is flushed if connected |
    """

    def __init__(self, urls: str, *, name: str, max_outgoing_bytes: int = 8 << 20) -> None:
        """`urls` is one or several server URLs, separated by commas; `name` is shown by the server."""
        self._urls = [url.strip() for url in urls.split(",") if url.strip()]
        if not self._urls:
            raise ConfigError("nats_url is empty", param="nats_url")
        self._name = name
        self._client: Client | None = None
        self._connected = asyncio.Event()
        self._closing = False
        self._supervisor: asyncio.Task[None] | None = None
        self._max_payload = DEFAULT_MAX_PAYLOAD
        self._outgoing = Outgoing(max_outgoing_bytes)
        self._subscriptions: list[NatsSubscription] = []
        self._listeners: list[StateListener] = []
        self._inbox = ""
        self._waiting: dict[str, asyncio.Future[bytes]] = {}
        self._num_requests = 0
        self._complaints: set[str] = set()

    @property
    def connected(self) -> bool:
        return self._connected.is_set()

    @property
    def max_payload(self) -> int:
        return self._max_payload

    @property
    def num_dropped(self) -> int:
        """Messages given to `publish` or `reply` that were dropped: no connection, or the buffer was full."""
        return self._outgoing.num_dropped

    def on_state(self, listener: StateListener) -> None:
        self._listeners.append(listener)

    async def connect(self) -> None:
        if self._supervisor is None:
            self._supervisor = asyncio.create_task(self._stay_connected(), name="nats")
        await self._connected.wait()

    def publish(self, subject: str, payload: bytes) -> None:
        self._check_size(payload)
        if not self.connected or not self._outgoing.put(subject, payload, ""):
            self._outgoing.num_dropped += 1

    def reply(self, subject: str, payload: bytes) -> None:
        """Answer on an inbox; like `publish`, but never raises."""
        if len(payload) > self._max_payload:
            log.error("reply too large", size=len(payload))
        else:
            self.publish(subject, payload)

    async def request(self, subject: str, payload: bytes, timeout_s: float) -> bytes:
        self._check_size(payload)
        if not self.connected:
            raise ControlDisconnected("NATS is not connected")
        self._num_requests += 1
        token = str(self._num_requests)
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[token] = answer
        try:
            if not self._outgoing.put(subject, payload, f"{self._inbox}.{token}"):
                raise ControlDisconnected("NATS takes messages too slowly: the outgoing buffer is full")
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            raise ControlTimeout(f"no answer on {subject} within {timeout_s} s") from None
        except NoResponders:
            raise NoResponders(f"nobody listens on {subject}") from None
        finally:
            del self._waiting[token]

    async def subscribe(self, subject: str, handler: Handler, queue: str = "") -> "NatsSubscription":
        """Done when the server knows of it, so that a request made from now on finds it.

        Without a connection it is made as soon as there is one. Raises ControlDisconnected before the first
        `connect` and after `close`.
        """
        if self._supervisor is None or self._closing:
            raise ControlDisconnected("connect before subscribing")
        subscription = NatsSubscription(self, subject, handler, queue)
        self._subscriptions.append(subscription)
        client = self._client
        if client is not None:
            with suppress(Error, TimeoutError):  # a lost connection: the next one makes it anew
                await subscription.attach(client)
                await _settled(client)
        return subscription

    def forget(self, subscription: "NatsSubscription") -> None:
        if subscription in self._subscriptions:
            self._subscriptions.remove(subscription)

    async def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        client = self._client
        if client is not None and self.connected:
            with suppress(Error, TimeoutError):
                async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                    await self._outgoing.emptied()
                    await client.drain()
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.wait([self._supervisor])
        self._set_connected(False)

    async def _stay_connected(self) -> None:
        pause = _FIRST_PAUSE_S
        while not self._closing:
            lost = asyncio.Event()
            client = Client()
            try:
                await self._open(client, lost)
                pause = _FIRST_PAUSE_S
                await self._use(client, lost)
            except Exception as error:  # whatever nats-py's inside raises: replace the connection
                self._complain(error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)
            finally:
                self._lose()
                await _discard(client)

    async def _open(self, client: Client, lost: asyncio.Event) -> None:
        async def on_closed() -> None:
            lost.set()

        await client.connect(
            servers=self._urls,
            name=self._name,
            error_cb=self._on_error,
            closed_cb=on_closed,
            allow_reconnect=False,
            max_reconnect_attempts=1,  # per server; then it raises, and we decide
            reconnect_time_wait=_FIRST_PAUSE_S,
            connect_timeout=_CONNECT_TIMEOUT_S,
            ping_interval=_PING_S,
            max_outstanding_pings=_PINGS_MISSED,
            skip_subject_validation=True,
        )
        self._inbox = client.new_inbox()
        await client.subscribe(f"{self._inbox}.*", cb=self._on_answer)
        self._client = client
        for subscription in list(self._subscriptions):
            await subscription.attach(client)
        await _settled(client)

    async def _use(self, client: Client, lost: asyncio.Event) -> None:
        """Returns when the connection is lost, or was closed while it was made."""
        if self._closing:  # nats-py's connect swallows cancellations
            return
        self._max_payload = client.max_payload
        self._complaints.clear()
        log.info("NATS connected", server=client.connected_url.netloc.rpartition("@")[2])
        async with asyncio.TaskGroup() as group:
            writer = group.create_task(self._write(client, lost), name="nats-writer")
            self._set_connected(True)
            await lost.wait()
            writer.cancel()
        if not self._closing:
            log.warning("NATS lost")

    async def _write(self, client: Client, lost: asyncio.Event) -> None:
        while not lost.is_set():  # nats-py may swallow the cancellation of a publish
            subject, payload, reply = await self._outgoing.get()
            with suppress(Error):  # the connection is going; `lost` follows
                await client.publish(subject, payload, reply)
            self._outgoing.done()

    def _lose(self) -> None:
        self._client = None
        self._outgoing.clear()
        self._set_connected(False)
        for answer in list(self._waiting.values()):
            _resolve(answer, ControlDisconnected("the connection to NATS was lost"))

    async def _on_answer(self, msg: Msg) -> None:
        answer = self._waiting.get(msg.subject.rpartition(".")[2])
        if answer is None:
            return  # came after its deadline
        if msg.headers and msg.headers.get("Status") == "503" and not msg.data:
            _resolve(answer, NoResponders("no responders"))
        else:
            _resolve(answer, msg.data)

    async def _on_error(self, error: Exception) -> None:
        if isinstance(error, SlowConsumerError):
            log.error("messages dropped, handler too slow", subject=error.subject)
        else:
            self._complain(error)

    def _complain(self, error: Exception) -> None:
        """Log what is wrong with the connection, each thing once until there is one again."""
        complaint = f"{type(error).__name__}: {error}"
        if complaint not in self._complaints:
            self._complaints.add(complaint)
            servers = [url.rpartition("@")[2] for url in self._urls]
            log.warning("NATS trouble", servers=servers, error=complaint)

    def _check_size(self, payload: bytes) -> None:
        if len(payload) > self._max_payload:
            raise PayloadTooLarge(f"{len(payload)} bytes are over the NATS server's {self._max_payload}")

    def _set_connected(self, connected: bool) -> None:
        if connected == self.connected:
            return
        if connected:
            self._connected.set()
        else:
            self._connected.clear()
        for listener in self._listeners:
            listener(connected)


class NatsSubscription:
    """What the transport keeps of one subscription, from connection to connection."""

    def __init__(self, transport: NatsTransport, subject: str, handler: Handler, queue: str) -> None:
        self._transport = transport
        self._subject = subject
        self._handler = handler
        self._queue = queue
        self._client: Client | None = None
        self._wire: WireSubscription | None = None

    async def attach(self, client: Client) -> None:
        """Make the subscription on this connection, once. Raises nats.errors.Error."""
        if self._client is client:
            return
        self._client = client
        self._wire = await client.subscribe(
            self._subject,
            self._queue,
            cb=self._on_message,
            pending_msgs_limit=_PENDING_MESSAGES,
            pending_bytes_limit=_PENDING_BYTES,
        )

    async def unsubscribe(self) -> None:
        self._transport.forget(self)
        if self._wire is not None:
            with suppress(Error):  # gone with its connection
                await self._wire.unsubscribe()

    async def _on_message(self, msg: Msg) -> None:
        try:
            self._handler(NatsIncoming(msg, self._transport.reply))
        except Exception:
            log.exception("message handler failed", subject=msg.subject)


class NatsIncoming:
    """One message of a subscription."""

    __slots__ = ("_msg", "_send")

    def __init__(self, msg: Msg, send: Callable[[str, bytes], None]) -> None:
        self._msg = msg
        self._send = send

    @property
    def subject(self) -> str:
        return str(self._msg.subject)

    @property
    def payload(self) -> bytes:
        return bytes(self._msg.data)

    def reply(self, payload: bytes) -> None:
        if self._msg.reply:
            self._send(self._msg.reply, payload)


def _resolve(answer: asyncio.Future[bytes], outcome: bytes | ControlError) -> None:
    if answer.done():
        return
    if isinstance(outcome, ControlError):
        answer.set_exception(outcome)
    else:
        answer.set_result(outcome)


async def _settled(client: Client) -> None:
    """Wait until the server has taken in every subscription made so far. Raises nats.errors.Error.

    nats-py writes the PING of a flush ahead of commands that its flusher task has not written yet; after
    the first round trip they are written, and the second one proves that they were read.
    """
    await client.flush()
    await client.flush()


async def _discard(client: Client) -> None:
    with suppress(Error, OSError, TimeoutError):
        async with asyncio.timeout(_CLOSE_TIMEOUT_S):
            await client.close()
