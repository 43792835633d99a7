"""The data plane's transport: ordered, tagged messages of raw bytes between two processes.

What UCX offers, reduced to what the KV pull needs: an endpoint to one peer, send and receive by tag,
exact sizes, and a close that is a fence. Knows nothing of leases and blocks. Implementations:
transport/ucx.py, transport/inproc.py.
"""

from collections.abc import Awaitable, Callable
from typing import Protocol

Buffer = object
"""Anything with the buffer protocol or a CUDA array interface; contiguous bytes."""


class KVEndpoint(Protocol):
    """One connection to one peer. Messages of one tag arrive in the order sent."""

    @property
    def alive(self) -> bool:
        """False once the peer is known to be lost or the endpoint was closed."""
        ...

    async def send(self, buffer: Buffer, tag: int) -> None:
        """Done when `buffer` may be reused. Raises KVPeerLost."""
        ...

    async def recv(self, buffer: Buffer, tag: int) -> None:
        """Fill `buffer` completely with the next message of `tag`. Raises KVPeerLost, KVTransferError.

        Cancelling does not take the buffer back: bytes may still be written into it until this message
        has completed or `close` has returned.
        """
        ...

    async def close(self) -> None:
        """The fence: once this returns, no byte is read from or written to any buffer given before.

        Pending sends and receives end with KVPeerLost. May take seconds, never on the event loop.
        Idempotent.
        """
        ...


OnEndpoint = Callable[[KVEndpoint], Awaitable[None]]


class KVTransport(Protocol):
    @property
    def name(self) -> str:
        """What really carries the bytes ("sm", "tcp", "rc", "cuda_ipc", "inproc"), for the metric label."""
        ...

    @property
    def address(self) -> str:
        """Where peers connect to; valid after `listen`."""
        ...

    async def listen(self, on_endpoint: OnEndpoint) -> None:
        """Accept peers; each gets its own task running `on_endpoint`, whose end closes the endpoint."""
        ...

    async def connect(self, address: str, timeout_s: float) -> KVEndpoint:
        """Raises KVPeerLost when nobody is there, KVTimeout."""
        ...

    async def close(self) -> None: ...
