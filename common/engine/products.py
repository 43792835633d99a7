"""Linear layers whose weights are laid out once for the CPU, instead of at every call.

By our own kernels where they can be had, by oneDNN elsewhere; bfloat16 only. Knows nothing of models.
"""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from common.engine.kernels import PANEL


class KernelLinear(nn.Module):
    """A linear layer for torch.ops.galley.linear: bfloat16 in, bfloat16 or (`unrounded`) float32 out.

    `packed` is bfloat16 `[ceil(n / 32), k / 2, 32, 2]`, `bias` float32 `[ceil(n / 32) * 32]` or None. Made
    from a linear layer on the meta device it has the right shapes and no contents.
    """

    bias: Tensor | None

    def __init__(self, linear: nn.Linear, *, unrounded: bool = False) -> None:
        super().__init__()
        self._unrounded = unrounded
        self._n, k = linear.weight.shape
        panels = -(-self._n // PANEL)
        if linear.weight.is_meta:
            packed = linear.weight.new_empty(panels, k // 2, PANEL, 2)
        else:
            packed = torch.ops.galley.pack(linear.weight.detach())
        self.register_buffer("packed", packed)
        bias = None
        if linear.bias is not None:
            bias = nn.functional.pad(linear.bias.detach().float(), (0, panels * PANEL - self._n))
        self.register_buffer("bias", bias)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = torch.ops.galley.linear(inputs, self.packed, self.bias, self._n, self._unrounded)
        return cast(Tensor, outputs)


class _OneDnnLinear(nn.Module):
    """A linear layer in oneDNN's layout: halves a decode step, leaves long prefills as they are."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())
        self._bias = linear.bias

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = torch.ops.mkldnn._linear_pointwise(inputs, self._packed, self._bias, "none", [], "")
        return cast(Tensor, outputs)


def use_kernels(module: nn.Module) -> None:
    """Put a KernelLinear in the place of every linear layer of `module` that can have one.

    The head of a language model answers in float32: near 20, where logits lie, bfloat16 has steps of 0.125,
    and a token 0.1 behind would draw level.
    """
    head = module.get_output_embeddings() if isinstance(module, PreTrainedModel) else None

    def make(linear: nn.Linear) -> nn.Module | None:
        return None if linear.in_features % 2 else KernelLinear(linear, unrounded=linear is head)

    _replace(module, make)


def pack_linears(module: nn.Module) -> None:
    """Lay out every linear layer of `module` by oneDNN, where this build of torch has it."""
    if hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        _replace(module, _OneDnnLinear)


def _replace(module: nn.Module, make: Callable[[nn.Linear], nn.Module | None]) -> None:
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and (made := make(child)) is not None:
                setattr(parent, name, made)
