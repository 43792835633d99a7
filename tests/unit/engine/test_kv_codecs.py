"""Eight-bit KV: error bounds for any shape and type, zeros and infinities, and what fp8 bytes mean."""

import asyncio
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from common.engine.kv_codecs import from_fp8, make_codecs, to_fp8
from common.ids import BlockId
from common.kv.layout import DType, KVLayout

TYPES: dict[DType, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
NAMES = ("fp8", "int8")


def there_and_back(name: str, block: Tensor, dtype: DType = "float32") -> Tensor:
    """Block 1 of a pool, encoded, then decoded into block 0 of another; `[heads, layers, 2, tokens, dim]`."""
    heads, layers, _, tokens, dim = block.shape
    layout = KVLayout(heads, layers, tokens, dim, dtype)
    source, target = (torch.full(layout.pool_shape(2), 7.0, dtype=TYPES[dtype]) for _ in range(2))
    source[1] = block

    async def travel() -> None:
        sender, receiver = make_codecs(source, layout)[name], make_codecs(target, layout)[name]
        data = await sender.encode(BlockId(1))
        assert memoryview(data).nbytes == receiver.encoded_bytes == block.numel() + heads * layers * 2 * 4  # type: ignore[arg-type]
        landed = receiver.scratch()
        memoryview(landed)[:] = memoryview(data)  # type: ignore[arg-type]
        await receiver.decode(landed, BlockId(0))

    asyncio.run(travel())
    assert bool((target[1] == 7.0).all())
    assert bool((source[0] == 7.0).all())
    return target[0].float()


def peaks(block: Tensor) -> Tensor:
    """The largest magnitude of each head, layer and K or V."""
    return block.abs().amax((3, 4), keepdim=True)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    dtype=st.sampled_from(sorted(TYPES)),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 17), st.integers(1, 65)),
    spread=st.sampled_from([1e-3, 1.0, 50.0]),
    seed=st.integers(0, 2**31),
)
def test_every_number_comes_back_within_half_a_step(
    name: str, dtype: DType, shape: tuple[int, int, int, int], spread: float, seed: int
) -> None:
    heads, layers, tokens, dim = shape
    random = torch.Generator().manual_seed(seed)
    block = (torch.randn(heads, layers, 2, tokens, dim, generator=random) * spread).to(TYPES[dtype]).float()
    found = there_and_back(name, block, dtype)
    rounding = block.abs() * torch.finfo(TYPES[dtype]).eps + torch.finfo(TYPES[dtype]).smallest_normal * 2**-9
    if name == "int8":
        allowed = peaks(block) / 127 / 2
    else:  # three bits of mantissa, and steps of 2**-9 below 2**-6
        allowed = torch.maximum(block.abs() * 2**-4, peaks(block) / 448 * 2**-10)
    assert bool(((found - block).abs() <= allowed * 1.001 + rounding).all())


@pytest.mark.parametrize("name", NAMES)
def test_the_largest_of_each_group_keeps_its_value(name: str) -> None:
    block = torch.randn(2, 3, 2, 5, 7)
    found = there_and_back(name, block)
    largest = block.abs() == peaks(block)
    assert torch.allclose(found[largest], block[largest], rtol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_a_small_head_beside_a_large_one_keeps_its_precision(name: str) -> None:
    block = torch.randn(2, 1, 2, 16, 8)
    block[0] *= 1e6
    found = there_and_back(name, block)
    assert float((found[1] - block[1]).abs().max()) < 0.2


@pytest.mark.parametrize("dtype", sorted(TYPES))
@pytest.mark.parametrize("name", NAMES)
def test_zeros_stay_zeros(name: str, dtype: DType) -> None:
    assert not there_and_back(name, torch.zeros(1, 2, 2, 3, 5), dtype).any()


@pytest.mark.parametrize("name", NAMES)
def test_numbers_too_small_for_a_scale_become_zero_not_nonsense(name: str) -> None:
    assert float(there_and_back(name, torch.full((1, 1, 2, 2, 2), 1e-44)).abs().max()) <= 1e-43


@pytest.mark.parametrize("dtype", sorted(TYPES))
@pytest.mark.parametrize("name", NAMES)
def test_infinities_become_the_largest_finite_number_and_spoil_nothing_else(name: str, dtype: DType) -> None:
    block = torch.ones(1, 2, 2, 2, 4)
    block[0, 0, 0, 0] = torch.tensor([math.inf, -math.inf, math.nan, 2.0])
    found = there_and_back(name, block, dtype)
    assert found[0, 0, 0, 0].tolist() == [2.0, -2.0, 0.0, 2.0]
    assert torch.allclose(found[0, 0, 0, 1], torch.ones(4), rtol=0.01)
    assert bool((found[0, 1] == 1.0).all())


@pytest.mark.parametrize("name", NAMES)
def test_a_group_without_any_finite_number_becomes_zero(name: str) -> None:
    assert not there_and_back(name, torch.full((1, 1, 2, 2, 2), math.inf)).any()


def test_fp8_bytes_mean_what_e4m3_says() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    theirs = codes.view(torch.float8_e4m3fn).float()
    numbers = ~theirs.isnan()
    assert int(numbers.sum()) == 254
    assert torch.equal(from_fp8(codes)[numbers], theirs[numbers])
    assert torch.equal(to_fp8(theirs[numbers]), codes[numbers])
