"""The shape of the KV pool, in elements and bytes, and the fingerprint that two instances compare.

The pool is one tensor, block-major and heads first:
`[num_blocks, kv_heads, num_layers, 2, block_size, head_dim]` (2 = key, value). A block of all layers is
one run of memory. Knows nothing of torch and of who owns a block.
"""

import hashlib
from dataclasses import asdict, dataclass
from typing import Literal

import orjson

DType = Literal["float32", "bfloat16", "float16"]

_ITEMSIZE: dict[DType, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Everything that must be equal on both sides before one byte of KV moves."""

    kv_heads: int
    num_layers: int
    block_size: int
    head_dim: int
    dtype: DType

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: all heads, all layers, keys and values of `block_size` tokens."""
        elements = self.kv_heads * self.num_layers * 2 * self.block_size * self.head_dim
        return elements * _ITEMSIZE[self.dtype]

    def pool_shape(self, num_blocks: int) -> tuple[int, int, int, int, int, int]:
        """Shape of the whole pool tensor, in elements."""
        return (num_blocks, self.kv_heads, self.num_layers, 2, self.block_size, self.head_dim)

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def fingerprint(self, weights: str) -> str:
        """Identity of layout and weights together; `weights` names the exact parameters."""
        data = orjson.dumps([asdict(self), weights], option=orjson.OPT_SORT_KEYS)
        return hashlib.blake2b(data, digest_size=16).hexdigest()
