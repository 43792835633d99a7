"""Attention of decode rows straight from block tables: one new token for each row, over the whole pool.

On GPUs by a kernel of our own, in Triton, "galley_paged_decode" (triton_decode.py); where that cannot run, by
gathering whole blocks and torch's scaled_dot_product_attention at the tables' width. Both have shapes that
depend on the number of rows and the width of the tables alone, which is what a CUDA graph needs.

FlashAttention 2 attends over block tables too, but its pages are multiples of 256 tokens: on average half of
one would lie empty at every sequence's end, and prefixes would be shared and KV moved in such pieces only.
Knows nothing of models and plans.
"""

import structlog
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from common.engine.attention import MakeDecode, PagedPool, additive_mask, explicit
from common.engine.interface import AttentionKind
from common.kv.layout import KVLayout

_log = structlog.get_logger()


class GatheredDecode:
    """See MakeDecode; the fallback. Reads a row's last block to its end: what is unwritten must be finite."""

    def __init__(self, pool: PagedPool, tables: Tensor, lengths: Tensor) -> None:
        self._pool = pool
        self._lengths = lengths
        width, size = tables.shape[1], pool.layout.block_size
        begun = torch.arange(width, device=tables.device) * size < lengths[:, None]
        self._runs = pool.runs(torch.where(begun, tables, tables[:, :1]))
        self._capacity = width * size
        self._workspace = pool.tensor.new_empty(len(self._runs), size * pool.layout.head_dim)
        self._masks: dict[int | None, Tensor] = {}

    @staticmethod
    def workspace_bytes(layout: KVLayout, rows: int, width: int) -> int:
        """What gathering one layer's keys and values takes."""
        return rows * width * layout.block_bytes // layout.num_layers

    def attend(self, layer: int, query: Tensor, kind: AttentionKind) -> Tensor:
        """See DecodeAttention.attend."""
        rows, heads, dim = query.shape
        key, value = self._pool.gather(layer, self._runs, rows, self._workspace)
        if kind.window not in self._masks:
            self._masks[kind.window] = additive_mask(
                self._lengths, 1, self._capacity, kind.window, query.dtype
            )
        mask = self._masks[kind.window]
        if kind.softcap is not None:
            return explicit(query[:, :, None], key, value, mask, kind)[:, :, 0]
        # The heads that share keys are its queries: torch's fast kernels know no grouped heads with a mask.
        grouped = query.reshape(rows, key.shape[1], -1, dim)
        mask = mask.expand(-1, -1, grouped.shape[2], -1)
        out = scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=kind.scaling)
        return out.reshape(rows, heads, dim)


def find_kernel(pool: PagedPool, heads: int) -> MakeDecode | None:
    """The Triton kernel, if it runs on the pool's device and is right there; else None, and the log says why.

    Compiles and waits for the device: for the start.
    """
    try:
        from common.engine.triton_decode import TritonDecode
    except ImportError as error:
        reason = str(error)
    else:
        reason = why_not(TritonDecode, pool, heads)
        if not reason:
            return TritonDecode
    _log.warning("decode attention gathers blocks, which is slower", reason=reason)
    return None


def why_not(make: MakeDecode, pool: PagedPool, heads: int) -> str:
    """Why `make` is not to be used with pools like this one; empty if it does what the fallback does."""
    layout = pool.layout
    shape, device = layout.pool_shape(3), pool.device
    small = PagedPool(torch.randn(shape, device=device).to(pool.tensor.dtype), layout)
    tables = torch.tensor([[1, 2], [2, 0]], device=device)
    lengths = torch.tensor([2 * layout.block_size - 1, 1], device=device)
    query = torch.randn(2, heads, layout.head_dim, device=device).to(pool.tensor.dtype)
    kind = AttentionKind(layout.head_dim**-0.5)
    try:
        found = make(small, tables, lengths).attend(layout.num_layers - 1, query, kind)
        right = GatheredDecode(small, tables, lengths).attend(layout.num_layers - 1, query, kind)
        near = torch.allclose(found.float(), right.float(), rtol=0.05, atol=0.05)
    except Exception as error:  # Triton raises what its compiler, the C compiler and the driver raise
        return f"the kernel does not run here: {type(error).__name__}: {error}"
    return "" if near else "the kernel computes something else"
