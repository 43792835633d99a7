"""Decode attention written down plainly, in float32, a row and a head at a time; and cases to try it on.

Knows nothing of kernels.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from common.engine.attention import PagedPool
from common.engine.interface import AttentionKind
from common.engine.loading import torch_dtype
from common.kv.layout import KVLayout

_NUM_BLOCKS = 64
_WIDTH = 24
LENGTHS = (1, 2, 15, 16, 17, 64, 65, 100, 257, 384)


@dataclass(frozen=True, slots=True)
class Case:
    """`query` `[rows, heads, head_dim]`, rows of LENGTHS over scrambled block tables."""

    pool: PagedPool
    tables: Tensor
    lengths: Tensor
    query: Tensor


def random_case(layout: KVLayout, heads: int, device: torch.device, seed: int = 0) -> Case:
    """Random numbers everywhere, in slots that nobody may look at too."""
    source = torch.Generator().manual_seed(seed)
    dtype = torch_dtype(layout.dtype)
    pool = torch.randn(layout.pool_shape(_NUM_BLOCKS), generator=source).to(device, dtype)
    query = torch.randn(heads, len(LENGTHS), layout.head_dim, generator=source).to(device, dtype)
    tables = torch.stack([torch.randperm(_NUM_BLOCKS, generator=source)[:_WIDTH] for _ in LENGTHS])
    # Not contiguous, as those that come from a model and a DecodeInputs.
    tables = tables.T.contiguous().T.to(device)
    return Case(PagedPool(pool, layout), tables, torch.tensor(LENGTHS, device=device), query.transpose(0, 1))


def attend_plainly(case: Case, layer: int, kind: AttentionKind) -> Tensor:
    """Float32 `[rows, heads, head_dim]`, on the CPU."""
    pool, query = case.pool.tensor.float().cpu(), case.query.float().cpu()
    group = query.shape[1] // pool.shape[1]
    out = torch.empty(query.shape)
    for row, (length, table) in enumerate(zip(LENGTHS, case.tables.cpu(), strict=True)):
        first = 0 if kind.window is None else max(0, length - kind.window)
        for head in range(query.shape[1]):
            key, value = (
                pool[table, head // group, layer, which].flatten(0, 1)[first:length] for which in (0, 1)
            )
            scores = key @ query[row, head] * kind.scaling
            if kind.softcap is not None:
                scores = kind.softcap * torch.tanh(scores / kind.softcap)
            weights = [math.exp(score - float(scores.max())) for score in scores]
            out[row, head] = torch.tensor(weights) @ value / sum(weights)
    return out
