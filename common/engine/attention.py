"""Attention of one packed batch over a paged, block-major KV pool, in plain torch.

The pool is `[num_blocks, kv_heads, num_layers, 2, block_size, head_dim]`. A step packs all rows of a plan
into one token axis; everything about it that is equal for all layers (where to write, which blocks to
gather, masks) is computed once. Knows nothing of models, of sampling and of who owns a block.
"""

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from common.engine.interface import AttentionKind
from common.engine.runner import PlanRow
from common.engine.staging import to_device
from common.kv.layout import KVLayout

_MAX_PADDING: Final = 2
"""How many times the blocks of the shortest row of a group the longest may have."""
_MIN_PADDED_BLOCKS: Final = 16
_TILE: Final = 64
"""Queries per tile: their scores over a few thousand keys fit a core's second-level cache."""


class DecodeAttention(Protocol):
    """Attention of one new token for each of some rows, over keys and values that are in the pool."""

    def attend(self, layer: int, query: Tensor, kind: AttentionKind) -> Tensor:
        """`query` and the answer are `[rows, heads, head_dim]`."""
        ...


class PagedPool:
    """The pool tensor and its two views: tokens of a layer for writing, blocks of a layer for gathering."""

    def __init__(self, tensor: Tensor, layout: KVLayout) -> None:
        self.tensor = tensor
        self.layout = layout
        self._runs = tensor.view(-1, layout.block_size * layout.head_dim)
        self._keys = [tensor[:, :, layer, 0] for layer in range(layout.num_layers)]
        self._values = [tensor[:, :, layer, 1] for layer in range(layout.num_layers)]

    @property
    def device(self) -> torch.device:
        return self.tensor.device

    def write(self, layer: int, blocks: Tensor, offsets: Tensor, key: Tensor, value: Tensor) -> None:
        """Store `[tokens, kv_heads, head_dim]` at (blocks[i], offsets[i])."""
        self._keys[layer][blocks, :, offsets] = key
        self._values[layer][blocks, :, offsets] = value

    def runs(self, tables: Tensor) -> Tensor:
        """Indices for `gather`: of a block table `[rows, blocks]`, flat over (2, rows, heads, blocks)."""
        heads, layers = self.layout.kv_heads, self.layout.num_layers
        head = torch.arange(heads, device=tables.device)[None, :, None]
        keys = (tables[:, None, :] * heads + head) * (2 * layers)
        return torch.stack((keys, keys + 1)).flatten()

    def gather(self, layer: int, runs: Tensor, rows: int, out: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values `[rows, kv_heads, tokens, head_dim]` of whole blocks, copied into `out`."""
        torch.index_select(self._runs[2 * layer :], 0, runs, out=out)
        both = out.view(2, rows, self.layout.kv_heads, -1, self.layout.head_dim)
        return both[0], both[1]

    def clear(self, blocks: Tensor) -> None:
        """Zero whole blocks, all layers."""
        self.tensor.index_fill_(0, blocks, 0)


class MakeDecode(Protocol):
    """Made anew for each step: block tables int64 `[rows, width]`, lengths int64 `[rows]`, all above 0.

    What a table holds behind a row's blocks are numbers of blocks, whichever.
    """

    def __call__(self, pool: PagedPool, tables: Tensor, lengths: Tensor) -> DecodeAttention: ...


@dataclass(slots=True)
class _Part:
    """Rows of the batch that attend together: one prefill chunk, or decode rows of similar length.

    `first` is the packed index of the first query; `rows` x `queries` query tokens, each row's last one at
    position lengths[row] - 1, a chunk's first one at `start`. `runs` is None when keys and values are
    exactly the queries' own, or `kernel` reads them from the pool.
    """

    first: int
    rows: int
    queries: int
    start: int
    lengths: Tensor
    shortest: int
    longest: int
    capacity: int
    runs: Tensor | None
    kernel: DecodeAttention | None
    masks: dict[int | None, Tensor | None] = field(default_factory=dict)

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """What to add to scores, `[rows, 1, queries, capacity]`, causal and aligned to the bottom right.

        None when that hides nothing, or when plain causality says it all.
        """
        if window not in self.masks:
            self.masks[window] = self._make_mask(window, dtype)
        return self.masks[window]

    def _make_mask(self, window: int | None, dtype: torch.dtype) -> Tensor | None:
        if self.runs is None and (window is None or window >= self.queries):
            return None
        # From numbers that the host has: to ask the device would be to wait for it.
        all_seen = self.shortest == self.capacity and (window is None or self.longest <= window)
        if self.queries == 1 and all_seen:
            return None
        return additive_mask(self.lengths, self.queries, self.capacity, window, dtype)


class PagedStep:
    """What the attention function needs to know about one step; built once, used by every layer.

    Rows are packed prefills first, then decodes by length, so that decode rows of similar length attend
    in one call with little padding. `order` gives the packed rows as indices into the plan's rows.
    """

    def __init__(self, pool: PagedPool, rows: Seq[PlanRow], kernel: MakeDecode | None = None) -> None:
        """With a `kernel` decode rows attend through it."""
        self._pool = pool
        self._kernel = kernel
        self.order = sorted(range(len(rows)), key=lambda i: (rows[i].count == 1, rows[i].start))
        packed = [rows[i] for i in self.order]
        self.ends = list(accumulate(row.count for row in packed))
        size, groups = pool.layout.block_size, self._groups(packed)
        positions = np.concatenate([np.arange(row.start, row.start + row.count) for row in packed])
        ids, at, self._blocks, self._offsets, begun, *rest = to_device(
            [
                [token for row in packed for token in row.tokens[row.start : row.start + row.count]],
                positions,
                np.concatenate([_block_of_token(row, size) for row in packed]),
                positions % size,
                _begun_blocks(packed, size),
                *([row.start + row.count for row in group] for group in groups),
                *(_tables(group, size) for group in groups),
            ],
            pool.device,
        )
        self.input_ids, self.position_ids = ids[None], at[None]
        self._parts = self._make_parts(groups, rest[: len(groups)], rest[len(groups) :])
        self._workspace = self._make_workspace()
        # Slots not written yet are gathered and masked, and zero weight times a stale NaN would still be NaN.
        if len(begun):
            pool.clear(begun)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, kind: AttentionKind) -> Tensor:
        """Write the new keys and values, then attend.

        `query` is `[heads, tokens, head_dim]`, `key` and `value` `[kv_heads, tokens, head_dim]`; the answer
        is `[tokens, heads, head_dim]`.
        """
        self._pool.write(layer, self._blocks, self._offsets, key.transpose(0, 1), value.transpose(0, 1))
        outputs = []
        for part in self._parts:
            span = slice(part.first, part.first + part.rows * part.queries)
            if part.kernel is not None:
                outputs.append(part.kernel.attend(layer, query[:, span].transpose(0, 1), kind))
                continue
            if part.runs is None:
                k, v = key[None, :, span], value[None, :, span]
            else:
                k, v = self._pool.gather(layer, part.runs, part.rows, self._workspace[: len(part.runs)])
            outputs.append(self._attend_part(part, query[:, span], k, v, kind))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _attend_part(
        self, part: _Part, query: Tensor, key: Tensor, value: Tensor, kind: AttentionKind
    ) -> Tensor:
        fused = _prefers_fused(query, kind)
        if part.queries > 1 and not fused:
            return _tiled(query, key[0], value[0], part.start, kind).transpose(0, 1)
        batched = query.reshape(len(query), part.rows, part.queries, -1).transpose(0, 1)
        mask = part.mask(kind.window, query.dtype)
        out = (_fused if fused else explicit)(batched, key, value, mask, kind)
        return out.transpose(1, 2).flatten(0, 1)

    def _make_parts(
        self, groups: Seq[Seq[PlanRow]], lengths: Seq[Tensor], tables: Seq[Tensor]
    ) -> list[_Part]:
        firsts = accumulate((sum(row.count for row in group) for group in groups), initial=0)
        return [self._make_part(*part) for part in zip(firsts, groups, lengths, tables, strict=False)]

    def _groups(self, packed: Seq[PlanRow]) -> list[list[PlanRow]]:
        """Each chunk alone; decode rows together as long as padding to the longest does not waste much."""
        blocks = self._pool.layout.blocks_for
        groups: list[list[PlanRow]] = []
        limit = 0
        for row in packed:
            wanted = blocks(row.start + row.count)
            if row.count == 1 and wanted <= limit:
                groups[-1].append(row)
                continue
            groups.append([row])
            limit = max(_MIN_PADDED_BLOCKS, _MAX_PADDING * wanted) if row.count == 1 else 0
        return groups

    def _make_part(self, first: int, rows: Seq[PlanRow], lengths: Tensor, tables: Tensor) -> _Part:
        queries = rows[0].count
        ends = [row.start + row.count for row in rows]
        table = tables.view(len(rows), -1)
        kernel = self._kernel(self._pool, table, lengths) if self._kernel and queries == 1 else None
        runs = self._pool.runs(table) if len(tables) and kernel is None else None
        return _Part(
            first,
            len(rows),
            queries,
            rows[0].start,
            lengths,
            min(ends),
            max(ends),
            table.shape[1] * self._pool.layout.block_size if len(tables) else queries,
            runs,
            kernel,
        )

    def _make_workspace(self) -> Tensor:
        """One buffer for the blocks gathered by any part in any layer: fresh memory is slow to touch."""
        size = max((len(part.runs) for part in self._parts if part.runs is not None), default=0)
        layout = self._pool.layout
        return self._pool.tensor.new_empty(size, layout.block_size * layout.head_dim)


def _block_of_token(row: PlanRow, block_size: int) -> NDArray[np.int64]:
    """The pool block that holds each of the row's new tokens, `[count]`."""
    begin, end = row.start // block_size, -(-(row.start + row.count) // block_size)
    blocks = np.repeat(np.array(row.blocks[begin:end], np.int64), block_size)
    skip = row.start - begin * block_size
    return blocks[skip : skip + row.count]


def _begun_blocks(rows: Seq[PlanRow], block_size: int) -> list[int]:
    """The blocks that a step of these rows begins and does not fill."""
    return [
        row.blocks[end // block_size]
        for row in rows
        if (end := row.start + row.count) % block_size and row.start <= end // block_size * block_size
    ]


def _tables(rows: Seq[PlanRow], block_size: int) -> list[int]:
    """Block tables of rows that attend together, of one width; none for a prompt that meets only itself.

    Padding repeats the row's first block: its content is masked, but must be finite.
    """
    if rows[0].count > 1 and rows[0].start == 0:
        return []
    tables = [row.blocks[: -(-(row.start + row.count) // block_size)] for row in rows]
    width = max(map(len, tables))
    return [block for table in tables for block in (*table, *table[:1] * (width - len(table)))]


# --- arithmetic ------------------------------------------------------------------------------------


def additive_mask(
    lengths: Tensor, queries: int, capacity: int, window: int | None, dtype: torch.dtype
) -> Tensor:
    """`[rows, 1, queries, capacity]`: 0 where a row's last `queries` positions see a key, else -inf."""
    key = torch.arange(capacity, device=lengths.device)
    query = lengths[:, None] - queries + torch.arange(queries, device=lengths.device)
    hidden = key > query[:, :, None]
    if window is not None:
        hidden |= key <= query[:, :, None] - window
    mask = torch.zeros(hidden.shape, dtype=dtype, device=lengths.device).masked_fill_(hidden, -math.inf)
    return mask[:, None]


def _prefers_fused(query: Tensor, kind: AttentionKind) -> bool:
    """Torch's own kernels win on GPUs; they know no soft cap."""
    return query.device.type != "cpu" and kind.softcap is None


def explicit(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, kind: AttentionKind) -> Tensor:
    """Decode attention, `[rows, heads, 1, dim]`: the heads that share keys are the rows of one product."""
    rows, heads, _, dim = query.shape
    kv_heads = key.shape[1]
    grouped = (query * kind.scaling).reshape(rows, kv_heads, heads // kv_heads, dim)
    scores = _capped(grouped @ key.transpose(-1, -2), kind)
    if mask is not None:
        scores += mask
    return (torch.softmax(scores, -1) @ value).reshape(rows, heads, 1, dim)


def _tiled(query: Tensor, key: Tensor, value: Tensor, start: int, kind: AttentionKind) -> Tensor:
    """Causal attention of one chunk, `[heads, queries, dim]`, whose first query is at position `start`.

    `key` and `value` are `[kv_heads, at least start + queries, dim]`. Tiles of queries meet only the keys
    they may see, and their scores stay in the core's cache: three times as fast as torch's own kernel in
    bfloat16 on one core.
    """
    heads, queries, dim = query.shape
    kv_heads = len(key)
    grouped = (query * kind.scaling).reshape(kv_heads, heads // kv_heads, queries, dim)
    out = torch.empty_like(grouped)
    future = torch.full((_TILE, _TILE), -math.inf, dtype=query.dtype, device=query.device).triu_(1)
    for first in range(0, queries, _TILE):
        count = min(_TILE, queries - first)
        end = start + first + count
        low = 0 if kind.window is None else max(0, start + first + 1 - kind.window)
        tile = grouped[:, :, first : first + count]
        scores = _capped(tile.flatten(1, 2) @ key[:, low:end].transpose(-1, -2), kind)
        visible = scores.view(*tile.shape[:3], end - low)
        visible[..., -count:] += future[:count, :count]
        if kind.window is not None:
            # Query r sees keys above r + first + start - window: the rest is a triangle at the lower left.
            past = torch.ones(count, end - low, dtype=torch.bool, device=query.device)
            visible.masked_fill_(past.tril_(start + first - kind.window - low), -math.inf)
        weights = torch.softmax(scores, -1)
        out[:, :, first : first + count] = (weights @ value[:, low:end]).view(tile.shape)
    return out.view(heads, queries, dim)


def _capped(scores: Tensor, kind: AttentionKind) -> Tensor:
    """Gemma 2's soft cap, where there is one."""
    return scores if kind.softcap is None else torch.tanh(scores / kind.softcap) * kind.softcap


def _fused(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, kind: AttentionKind) -> Tensor:
    """Torch's fused kernel, `[rows, heads, queries, dim]`; causal when there is no mask."""
    return scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None and query.shape[2] > 1,
        scale=kind.scaling,
        enable_gqa=key.shape[1] < query.shape[1],
    )
