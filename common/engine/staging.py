"""Integers of a step on their way to the device: all in one copy, for which nobody waits.

A copy from pageable memory, which is what `torch.tensor(..., device="cuda")` makes, holds the thread until
the GPU has done all before it. Pinned memory comes from torch's caching allocator, which does not hand a
piece out again before the copy from it is done, so a step need not keep it. Knows nothing of plans.
"""

from collections.abc import Sequence as Seq

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Integers = Seq[int] | NDArray[np.int64]


def to_device(parts: Seq[Integers], device: torch.device) -> list[Tensor]:
    """Each of `parts` as a one-dimensional int64 tensor, views of one piece of memory."""
    sizes = [len(part) for part in parts]
    host = staging(sum(sizes), device=device)
    np.concatenate([np.asarray(part, np.int64) for part in parts], out=host.numpy())
    return list(torch.split(host.to(device, non_blocking=True), sizes))


def staging(*shape: int, device: torch.device) -> Tensor:
    """Host memory for int64, not initialised; pinned where the copy to `device` needs it."""
    return torch.empty(shape, dtype=torch.int64, pin_memory=device.type == "cuda")
