"""What a KV pool is: finished KV blocks by name, shared by instances that may come and go.

A name (messages/block_hash.py) covers layout, weights, salt, the block's tokens and all tokens before them, so
that an object, once published, never changes and two publishers of one name publish the same bytes. Knows
nothing of who wants a block and why.
"""

from collections.abc import Sequence as Seq
from typing import Protocol

from common.transport.kv import Buffer


class KVPool(Protocol):
    """A store of objects of one size, `block_bytes`.

    The pool is a cache: whatever it lacks, has lost or got back damaged is computed again by who wanted it,
    so no method makes a difference between these. Buffers given to `load` and `publish` are not touched any
    more once the call has returned, raised or been cancelled.
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
