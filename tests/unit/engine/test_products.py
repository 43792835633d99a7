"""Which linear layers are replaced, and what their replacements compute."""

import pytest
import torch
from torch import nn

from common.engine.products import KernelLinear, use_kernels

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("operators")]


class Scaled(nn.Linear):
    """A linear layer that does more than one."""


def network(device: str = "cpu") -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(
        nn.Linear(48, 70),
        nn.ModuleDict({"inner": nn.Linear(70, 33, bias=False)}),
        Scaled(33, 32),
        nn.Linear(33, 8),
    )
    return made.to(torch.bfloat16).to(device).requires_grad_(False)


def test_every_plain_layer_that_can_have_one_gets_a_kernel() -> None:
    module = network()
    use_kernels(module)
    outer, inner, scaled, odd = module
    assert isinstance(outer, KernelLinear)
    assert isinstance(inner.get_submodule("inner"), KernelLinear)
    assert type(scaled) is Scaled
    assert type(odd) is nn.Linear


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("outputs", [5, 32, 70])
def test_a_kernel_computes_what_the_layer_did(bias: bool, outputs: int) -> None:
    torch.manual_seed(outputs)
    linear = nn.Linear(48, outputs, bias=bias, dtype=torch.bfloat16)
    inputs = torch.randn(1, 7, 48, dtype=torch.bfloat16)
    exact = nn.functional.linear(
        inputs.double(), linear.weight.double(), linear.bias.double() if bias else None
    )
    got = KernelLinear(linear)(inputs)
    assert got.shape == (1, 7, outputs)
    assert torch.allclose(got.double(), exact, rtol=2**-8, atol=1e-5)


def test_on_the_meta_device_it_has_the_same_shapes() -> None:
    real, shapes = network(), network("meta")
    use_kernels(real)
    use_kernels(shapes)
    assert [(name, one.shape, one.dtype) for name, one in shapes.named_buffers()] == [
        (name, one.shape, one.dtype) for name, one in real.named_buffers()
    ]
    assert all(one.is_meta for one in shapes.buffers())
