"""KV blocks as eight bits a number: int8, or fp8 (e4m3), with one scale for each head, layer, and K or V.

An encoded block is its scales, float32 `[kv_heads, num_layers, 2]`, then one byte for each number in the
order of the pool. A group's largest finite magnitude becomes the format's largest, so that an error is at
most half a step of its scale. What is not finite has no place in either: infinities become the largest finite
number of their group, what is no number becomes 0. Knows nothing of the wire.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import torch
from torch import Tensor

from common.ids import BlockId
from common.kv.buffer import Buffer
from common.kv.codec import Codecs
from common.kv.layout import KVLayout

INT8_MAX: Final = 127.0
FP8_MAX: Final = 448.0
_SCALE_BYTES: Final = 4


def make_codecs(pool: Tensor, layout: KVLayout) -> Codecs:
    """The codecs of a pool `[num_blocks, kv_heads, num_layers, 2, block_size, head_dim]`.

    They share a thread of their own: the event loop stays free, and no step waits behind a block.
    """
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-codec")
    return {
        "fp8": TorchCodec(pool, layout, FP8_MAX, to_fp8, from_fp8, thread),
        "int8": TorchCodec(pool, layout, INT8_MAX, to_int8, from_int8, thread),
    }


class TorchCodec:
    """Implements KVCodec over a pool on any device; encoded blocks lie where the pool lies."""

    def __init__(
        self,
        pool: Tensor,
        layout: KVLayout,
        largest: float,
        narrow: Callable[[Tensor], Tensor],
        widen: Callable[[Tensor], Tensor],
        thread: ThreadPoolExecutor,
    ) -> None:
        """`narrow` rounds float32 within +-`largest` to bytes; `widen` gives float32 or float16 of them."""
        groups = layout.kv_heads * layout.num_layers * 2
        self._blocks = pool.view(len(pool), groups, -1)
        self._scales_end = groups * _SCALE_BYTES
        self._largest = largest
        self._narrow = narrow
        self._widen = widen
        self._thread = thread

    @property
    def encoded_bytes(self) -> int:
        return self._scales_end + self._blocks[0].numel()

    def scratch(self) -> Buffer:
        return _as_buffer(self._empty())

    async def encode(self, block: BlockId) -> Buffer:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._encode, block)

    async def decode(self, data: Buffer, block: BlockId) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._decode, data, block)

    def _empty(self) -> Tensor:
        return torch.empty(self.encoded_bytes, dtype=torch.uint8, device=self._blocks.device)

    @torch.inference_mode()
    def _encode(self, block: BlockId) -> Buffer:
        numbers = self._blocks[block].float()
        peaks = numbers.abs().amax(1, keepdim=True)
        if not bool(peaks.isfinite().all()):
            numbers = _finite(numbers)
            peaks = numbers.abs().amax(1, keepdim=True)
        scales = peaks / self._largest
        scales[scales == 0] = 1.0  # of nothing but zeros, or of what is too small for float32
        encoded = self._empty()
        self._scales_of(encoded).copy_(scales)
        codes = self._narrow((numbers / scales).clamp_(-self._largest, self._largest))
        self._codes_of(encoded).copy_(codes)
        self._settle()
        return _as_buffer(encoded)

    @torch.inference_mode()
    def _decode(self, data: Buffer, block: BlockId) -> None:
        encoded = torch.as_tensor(data, device=self._blocks.device)
        torch.mul(
            self._widen(self._codes_of(encoded)).float(), self._scales_of(encoded), out=self._blocks[block]
        )
        self._settle()

    def _scales_of(self, encoded: Tensor) -> Tensor:
        return encoded[: self._scales_end].view(torch.float32).view(-1, 1)

    def _codes_of(self, encoded: Tensor) -> Tensor:
        return encoded[self._scales_end :].view(self._blocks.shape[1:])

    def _settle(self) -> None:
        if self._blocks.is_cuda:
            torch.cuda.current_stream(self._blocks.device).synchronize()


def to_int8(numbers: Tensor) -> Tensor:
    """Bytes of float32 within +-127, rounded to even. Takes `numbers` over."""
    return numbers.round_().to(torch.int8).view(torch.uint8)


def from_int8(codes: Tensor) -> Tensor:
    return codes.view(torch.int8)


def to_fp8(numbers: Tensor) -> Tensor:
    """Bytes of float32 within +-448, rounded to even."""
    return numbers.to(torch.float8_e4m3fn).view(torch.uint8)


def from_fp8(codes: Tensor) -> Tensor:
    """float32 of e4m3 bytes: exponent and mantissa moved to where float16 has them, eight powers too low.

    Exact, subnormals included, and seven times as fast as torch's own conversion, which takes each number by
    itself. The two codes for no number, which are never sent, become 480.
    """
    halves = (codes.view(torch.int8).to(torch.int16) << 7) & ~0x4000
    return halves.view(torch.float16).float() * 256.0


def _finite(numbers: Tensor) -> Tensor:
    """Infinities as the largest finite magnitude of their group (dim 1), what is no number as 0."""
    largest = numbers.abs().nan_to_num(0.0, 0.0, 0.0).amax(1, keepdim=True)
    return numbers.nan_to_num(0.0, float("inf"), -float("inf")).clamp(-largest, largest)


def _as_buffer(encoded: Tensor) -> Buffer:
    return encoded if encoded.is_cuda else encoded.numpy()
