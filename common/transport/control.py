"""The control plane's transport: what Galley needs of a message bus, so that NATS can be replaced.

Delivers at most once, in order per publisher and subject. Handlers are plain functions called on the
event loop: they may only note down or enqueue, never wait. Knows nothing of messages; bytes in, bytes out.
Implementations: transport/nats.py, transport/memory.py.
"""

from collections.abc import Callable
from typing import Protocol


class Incoming(Protocol):
    """One received payload."""

    @property
    def subject(self) -> str: ...

    @property
    def payload(self) -> bytes: ...

    def reply(self, payload: bytes) -> None:
        """Answer a request; does nothing for a plain publish. Never waits, never raises on a lost bus."""
        ...


Handler = Callable[[Incoming], None]
StateListener = Callable[[bool], None]


class Subscription(Protocol):
    async def unsubscribe(self) -> None: ...


class ControlTransport(Protocol):
    @property
    def connected(self) -> bool:
        """Whether the bus can be used right now; a lost bus is reconnected for ever."""
        ...

    @property
    def max_payload(self) -> int:
        """Largest payload of one message in bytes."""
        ...

    def on_state(self, listener: StateListener) -> None:
        """Call `listener(connected)` whenever `connected` changes."""
        ...

    async def connect(self) -> None:
        """First connect; keeps trying until connected or cancelled."""
        ...

    def publish(self, subject: str, payload: bytes) -> None:
        """Send without an answer and without waiting; may be lost.

        Raises PayloadTooLarge. A lost bus drops it silently: whoever sends repairs.
        """
        ...

    async def request(self, subject: str, payload: bytes, timeout_s: float) -> bytes:
        """Send and wait for one answer.

        Raises NoResponders at once when nobody listens, ControlTimeout, ControlDisconnected,
        PayloadTooLarge.
        """
        ...

    async def subscribe(self, subject: str, handler: Handler, queue: str = "") -> Subscription:
        """Deliver every payload on `subject`, or with `queue` only this member's share."""
        ...

    async def close(self) -> None:
        """Flush what was published, then disconnect. Idempotent."""
        ...
