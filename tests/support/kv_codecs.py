"""A codec that changes every byte and loses nothing: KV that is not decoded, or decoded twice, shows."""

import asyncio

from common.ids import BlockId
from common.kv.buffer import Buffer, KVBuffer
from common.kv.codec import Codecs

SEAL = b"SEAL"


class MirrorCodec:
    """Every byte inverted, then a seal. Takes `delay_s` of loop time for a block."""

    def __init__(self, buffer: KVBuffer, delay_s: float = 0.0) -> None:
        self._buffer = buffer
        self._delay_s = delay_s
        self.encoded = 0
        self.decoded = 0

    @property
    def encoded_bytes(self) -> int:
        return self._buffer.block_bytes + len(SEAL)

    def scratch(self) -> Buffer:
        return bytearray(self.encoded_bytes)

    async def encode(self, block: BlockId) -> Buffer:
        await asyncio.sleep(self._delay_s)
        self.encoded += 1
        return _inverted(self._bytes(block)) + SEAL

    async def decode(self, data: Buffer, block: BlockId) -> None:
        await asyncio.sleep(self._delay_s)
        self.decoded += 1
        came = memoryview(data)  # type: ignore[arg-type]
        if came[-len(SEAL) :] != SEAL:
            raise ValueError("what came is not an encoded block")
        self._bytes(block)[:] = _inverted(came[: -len(SEAL)])

    def _bytes(self, block: BlockId) -> memoryview:
        return memoryview(self._buffer.block(block))  # type: ignore[arg-type]


def mirror(buffer: KVBuffer, name: str = "mirror") -> Codecs:
    return {name: MirrorCodec(buffer)}


def _inverted(data: memoryview) -> bytes:
    return bytes(data).translate(bytes(255 - byte for byte in range(256)))
