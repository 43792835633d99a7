"""The KV pool as raw blocks of bytes, which is all that transfer code sees of it.

Knows nothing of torch; a runner wraps its tensor (engine/runner_torch.py), the fake one a bytearray
(engine/runner_fake.py).
"""

from typing import Protocol

from common.ids import BlockId
from common.transport.kv import Buffer as Buffer


class KVBuffer(Protocol):
    @property
    def num_blocks(self) -> int: ...

    @property
    def block_bytes(self) -> int: ...

    def block(self, block: BlockId) -> Buffer:
        """The writable memory of one block: `block_bytes` contiguous bytes, no copy."""
        ...
