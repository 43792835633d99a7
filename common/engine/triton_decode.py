"""The kernel galley_paged_decode: decode attention over block tables, in Triton; importing it needs triton.

Keys of a row are split among programs, so that few rows with long contexts fill a GPU too; each program
makes an online softmax (Milakov and Gimelshein 2018) over its tiles of keys, and a second kernel joins the
parts, as in Flash-Decoding (Dao 2023). The query heads that share a KV head are the rows of one product.
Knows nothing of models; paged_decode.py decides whether it is used.
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.engine.attention import PagedPool
from common.engine.interface import AttentionKind

_TILE: Final = 64
"""Keys in one product."""
_PROGRAMS: Final = 264
"""Programs wanted at least: two for each multiprocessor of an H100 or H200."""
_MOST_SPLITS: Final = 64
_LEAST_DOT: Final = 16
"""Rows and columns that Triton's products have at least."""


class TritonDecode:
    """See attention.MakeDecode. Never reads slots behind a row's last token, nor before its window."""

    def __init__(self, pool: PagedPool, tables: Tensor, lengths: Tensor) -> None:
        self._pool = pool
        self._tables = tables
        self._lengths = lengths

    def attend(self, layer: int, query: Tensor, kind: AttentionKind) -> Tensor:
        """See attention.DecodeAttention.attend."""
        rows, heads, dim = query.shape
        pool, tables, lengths = self._pool.tensor, self._tables, self._lengths
        kv_heads, block_size = self._pool.layout.kv_heads, self._pool.layout.block_size
        splits = num_splits(rows * kv_heads, tables.shape[1] * block_size)
        query = query if query.stride(2) == 1 else query.contiguous()
        parts = query.new_empty(rows, heads, splits, dim, dtype=torch.float32)
        norms = query.new_empty(rows, heads, splits, 2, dtype=torch.float32)
        out = query.new_empty(rows, heads, dim)
        padded = max(_LEAST_DOT, triton.next_power_of_2(dim))
        with torch.cuda.device_of(query):
            galley_paged_decode[(rows, kv_heads, splits)](
                query, pool, tables, lengths, parts, norms,
                query.stride(0), query.stride(1), pool.stride(0), pool.stride(1), pool.stride(3),
                tables.stride(0), tables.stride(1),
                layer * pool.stride(2), kind.scaling, kind.softcap or 0.0, kind.window or 0,
                HEADS=heads, GROUP=heads // kv_heads, DIM=dim, BLOCK_SIZE=block_size,
                PADDED_GROUP=max(_LEAST_DOT, triton.next_power_of_2(heads // kv_heads)),
                PADDED_DIM=padded, TILE=_TILE, SPLITS=splits,
                WINDOWED=kind.window is not None, CAPPED=kind.softcap is not None,
            )  # fmt: skip
            galley_join_splits[(rows * heads,)](parts, norms, out, DIM=dim, PADDED_DIM=padded, SPLITS=splits)
        return out


def num_splits(programs: int, capacity: int) -> int:
    """How many share a row's keys: a power of two, no more than there can be tiles."""
    wanted = min(-(-_PROGRAMS // programs), _MOST_SPLITS, -(-capacity // _TILE))
    return 1 << (wanted.bit_length() - 1)


@triton.jit
def galley_paged_decode(
    query, pool, tables, lengths, parts, norms,
    query_row, query_head, pool_block, pool_head, pool_values, tables_row, tables_column,
    layer_offset, scaling, softcap, window,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    PADDED_GROUP: tl.constexpr, PADDED_DIM: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """One row, one KV head, one share of its keys: sums to `parts`, (maximum, normaliser) to `norms`."""
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    member, d, slot = tl.arange(0, PADDED_GROUP), tl.arange(0, PADDED_DIM), tl.arange(0, TILE)
    head = kv_head * GROUP + member
    inside = (member < GROUP)[:, None] & (d < DIM)[None, :]
    q = tl.load(query + row * query_row + head[:, None] * query_head + d[None, :], mask=inside, other=0.0)
    length = tl.load(lengths + row)
    lowest = length * 0
    if WINDOWED:
        lowest = tl.maximum(length - window, 0)
    first_tile, end_tile = lowest // TILE, (length + TILE - 1) // TILE
    share = (end_tile - first_tile + SPLITS - 1) // SPLITS
    begin = first_tile + split * share
    highest = tl.full((PADDED_GROUP,), float("-inf"), tl.float32)
    total = tl.zeros((PADDED_GROUP,), tl.float32)
    summed = tl.zeros((PADDED_GROUP, PADDED_DIM), tl.float32)
    for tile in range(begin, tl.minimum(begin + share, end_tile)):  # every tile has a key to see
        position = tile * TILE + slot
        seen = (position >= lowest) & (position < length)
        block = tl.load(
            tables + row * tables_row + position // BLOCK_SIZE * tables_column, mask=seen, other=0
        ).to(tl.int64)  # a pool has more than 2^31 elements
        start = block * pool_block + kv_head * pool_head + layer_offset + position % BLOCK_SIZE * DIM
        found = seen[:, None] & (d < DIM)[None, :]
        k = tl.load(pool + start[:, None] + d[None, :], mask=found, other=0.0)
        v = tl.load(pool + start[:, None] + pool_values + d[None, :], mask=found, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scaling
        if CAPPED:  # softcap * tanh(scores / softcap); Triton's language has no tanh of its own
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        shrink = tl.exp(highest - higher)
        total = total * shrink + tl.sum(weights, 1)
        summed = summed * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        highest = higher
    entry = (row * HEADS + head) * SPLITS + split
    tl.store(parts + entry[:, None] * DIM + d[None, :], summed, mask=inside)
    tl.store(norms + entry * 2, highest, mask=member < GROUP)
    tl.store(norms + entry * 2 + 1, total, mask=member < GROUP)


@triton.jit
def galley_join_splits(parts, norms, out, DIM: tl.constexpr, PADDED_DIM: tl.constexpr, SPLITS: tl.constexpr):
    """One row and head: the weighted mean of what the splits found; a split without keys weighs nothing."""
    entry = tl.program_id(0)
    split, d = tl.arange(0, SPLITS), tl.arange(0, PADDED_DIM)
    highest = tl.load(norms + (entry * SPLITS + split) * 2)
    total = tl.load(norms + (entry * SPLITS + split) * 2 + 1)
    weight = tl.exp(highest - tl.max(highest, 0))
    inside = (d < DIM)[None, :]
    part = tl.load(parts + (entry * SPLITS + split)[:, None] * DIM + d[None, :], mask=inside, other=0.0)
    result = tl.sum(part * weight[:, None], 0) / tl.sum(total * weight, 0)
    tl.store(out + entry * DIM + d, result.to(out.dtype.element_ty), mask=d < DIM)
