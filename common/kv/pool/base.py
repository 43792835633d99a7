"""What a KV pool is: finished KV blocks by name, shared by instances that may come and go.

A name (messages/block_hash.py) covers layout, weights, salt, the block's tokens and all tokens before them,
so that an object, once published, never changes and two publishers of one name publish the same bytes.
Knows nothing of who wants a block and why.
"""

from collections.abc import Sequence as Seq
from typing import Literal, Protocol

from common.transport.kv import Buffer


class KVPool(Protocol):
    """A store of objects of one size, `block_bytes`.

    The pool is a cache: whatever it lacks, has lost or got back damaged is computed again by who wanted it,
    so no method makes a difference between these. Buffers given to `load` and `publish` are host memory, and
    are not touched any more once the call has returned, raised or been cancelled. No call takes longer than
    the pool's timeout: what is done by then is the answer, or KVPoolUnavailable if nothing is.
    """

    async def match(self, names: Seq[bytes]) -> int:
        """How many of the first `names` are here now, without a gap. Raises KVPoolUnavailable."""
        ...

    async def load(self, names: Seq[bytes], blocks: Seq[Buffer]) -> int:
        """Fill `blocks`, one for each name, in order, up to the first that cannot be had undamaged.

        How many were filled; the contents of the others are undefined. Raises KVPoolUnavailable.
        """
        ...

    async def publish(self, names: Seq[bytes], blocks: Seq[Buffer]) -> int:
        """Make `blocks` readable under their names; one that is there already stays as it is.

        How many are there now; less than asked where the pool is full and everything in it is being read.
        Raises KVPoolUnavailable.
        """
        ...

    async def close(self) -> None:
        """Let go of everything; what was published stays for the others."""
        ...


PoolEvent = Literal["matched", "unmatched", "hit", "miss", "published", "refused", "evicted", "corrupt"]
"""What happened to a block: asked for with `match`; with `load`; published, or refused as the pool was full;
evicted by this instance; found damaged."""


class PoolMeter(Protocol):
    """Told what a pool does. Called on the event loop."""

    def count(self, event: PoolEvent, blocks: int) -> None: ...

    def unavailable(self) -> None:
        """A call ended with KVPoolUnavailable."""
        ...
