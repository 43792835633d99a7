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


def test_the_fake_operators_give_the_real_shapes() -> None:
    """What tracing goes by."""
    real, shapes = network(), network("meta")
    use_kernels(real)
    use_kernels(shapes)
    inputs = torch.zeros(2, 5, 48, dtype=torch.bfloat16)
    assert shapes[0](inputs.to("meta")).shape == real[0](inputs).shape == (2, 5, 70)
    query, key = (torch.zeros(heads, 3, 32, dtype=torch.bfloat16, device="meta") for heads in (4, 2))
    pool = torch.zeros(2, 2, 1, 2, 16, 32, dtype=torch.bfloat16, device="meta")
    rows, tables = (torch.zeros(1, n, dtype=torch.int32, device="meta") for n in (3, 1))
    out = torch.ops.galley.attend(query, key, key, pool, rows, tables, 0, 1.0, 0, 0.0)
    assert out.shape == (3, 4, 32)
