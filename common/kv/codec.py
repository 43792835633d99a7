"""KV made smaller on its way: what a codec does, and how reader and exporter agree on one.

A codec belongs to a pool and turns one of its blocks into fewer bytes and back, with loss. Off unless asked
for: by the prefill, which says so in the handoff, or by the decode. Only what the exporter has announced is
asked for, so that an exporter that knows of no compression never meets it. Knows nothing of torch (the real
ones are in engine/kv_codecs.py) and of the wire.
"""

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Final, Protocol

from common.ids import BlockId
from common.transport.kv import Buffer

PLAIN: Final = "none"
"""The name of no compression; every exporter and reader knows it."""


class KVCodec(Protocol):
    """Encodes and decodes blocks of one pool, one after the other and off the event loop.

    What is begun ends, whoever is cancelled meanwhile: a caller that gives up must still wait for it before
    the block is another's. Calls are served in order.
    """

    @property
    def encoded_bytes(self) -> int:
        """Length of every encoded block."""
        ...

    def scratch(self) -> Buffer:
        """Fresh memory for one encoded block, to receive into."""
        ...

    async def encode(self, block: BlockId) -> Buffer:
        """The block as `encoded_bytes` bytes of its own."""
        ...

    async def decode(self, data: Buffer, block: BlockId) -> None:
        """Fill the block from what `encode` made, there or in another process."""
        ...


Codecs = Mapping[str, KVCodec]
"""By name. A change of what is sent under a name needs a new name."""

NO_CODECS: Final[Codecs] = MappingProxyType({})


def choose(wanted: str, offered: str, announced: Collection[str], known: Collection[str]) -> str:
    """The compression that a reader asks for.

    `wanted` is the reader's own setting and goes first, `offered` the exporter's; either counts only where
    the exporter has `announced` it and it is `known` here, else the KV comes as it is.
    """
    possible = [name for name in (wanted, offered) if name in announced and name in known]
    return possible[0] if possible else PLAIN
