"""Products and attention of torch.ops.galley, against plain arithmetic in double precision.

Tolerances follow from bfloat16, which rounds by at most one part in 256: once for what comes out, and in
attention once for every weight.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from common.engine.kernels import HEAD_DIMS, MOST_GROUP

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("operators")]

ROUNDING = 2.0**-8
FLOAT32 = 2.0**-24


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.int16)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


# --- products --------------------------------------------------------------------------------------


def product(inputs: Tensor, weight: Tensor, bias: Tensor | None = None, *, unrounded: bool = False) -> Tensor:
    if bias is not None:
        bias = torch.nn.functional.pad(bias, (0, -len(bias) % 32))
    packed = torch.ops.galley.pack(weight)
    out: Tensor = torch.ops.galley.linear(inputs, packed, bias, len(weight), unrounded)
    return out


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("k", [2, 30, 48, 514])
@pytest.mark.parametrize("n", [1, 31, 32, 33, 100, 320])
def test_products_are_right_to_rounding(n: int, k: int, with_bias: bool) -> None:
    weight, inputs = normal(n, k, seed=n), normal(300, k, seed=k)
    bias = torch.randn(n) if with_bias else None
    exact = inputs.double() @ weight.double().T
    sums = inputs.double().abs() @ weight.double().abs().T
    if bias is not None:
        exact, sums = exact + bias, sums + bias.abs()
    summed = k * FLOAT32 * sums + 1e-30
    for rows in (*range(1, 51), 239, 240, 241, 300):
        error = (product(inputs[:rows], weight, bias).double() - exact[:rows]).abs()
        assert (error <= summed[:rows] + ROUNDING * exact[:rows].abs()).all(), rows
        whole = product(inputs[:rows], weight, bias, unrounded=True)
        assert whole.dtype == torch.float32
        assert ((whole.double() - exact[:rows]).abs() <= summed[:rows]).all(), rows


@pytest.mark.parametrize("n", [33, 320])
def test_a_rows_bits_do_not_depend_on_its_batch(n: int) -> None:
    weight, inputs = normal(n, 130, seed=1), normal(300, 130, seed=2)
    whole = bits(product(inputs, weight))
    for rows in (*range(1, 51), 240, 241, 299):
        for first in {0, 1, 300 - rows}:
            part = bits(product(inputs[first : first + rows], weight))
            assert torch.equal(part, whole[first : first + rows]), (first, rows)


def test_leading_axes_and_strides_are_the_inputs_own() -> None:
    weight, inputs = normal(40, 64), normal(2, 5, 64)
    flat = product(inputs.reshape(10, 64), weight)
    assert torch.equal(product(inputs, weight), flat.view(2, 5, 40))
    strided = inputs.transpose(0, 1).contiguous().transpose(0, 1)
    assert not strided.is_contiguous()
    assert torch.equal(product(strided, weight), flat.view(2, 5, 40))
    assert product(inputs[:0], weight).shape == (0, 5, 40)


def test_packing_moves_every_weight_to_its_place() -> None:
    weight = normal(70, 6)
    packed = torch.ops.galley.pack(weight)
    assert packed.shape == (3, 3, 32, 2)
    unpacked = packed.permute(0, 2, 1, 3).reshape(96, 6)
    assert torch.equal(unpacked[:70], weight)
    assert not unpacked[70:].any()
    assert torch.equal(torch.ops.galley.pack(weight.T.contiguous().T), packed)


def test_wrong_operands_of_products_are_refused() -> None:
    weight, inputs = normal(40, 64), normal(3, 64)
    packed, bias = torch.ops.galley.pack(weight), torch.zeros(64)
    for wrong in (weight.float(), weight[:, :63], weight[0]):
        with pytest.raises(RuntimeError, match="weight must be"):
            torch.ops.galley.pack(wrong)
    linear = torch.ops.galley.linear
    with pytest.raises(RuntimeError, match="x must be bfloat16"):
        linear(inputs.float(), packed, None, 40, False)
    with pytest.raises(RuntimeError, match="x has 62 inputs, the weight 64"):
        linear(inputs[:, :62], packed, None, 40, False)
    for outputs in (32, 65, 0, -1):
        with pytest.raises(RuntimeError, match="no weight of"):
            linear(inputs, packed, None, outputs, False)
    with pytest.raises(RuntimeError, match="packed must be"):
        linear(inputs, packed.float(), None, 40, False)
    with pytest.raises(RuntimeError, match="packed must be"):
        linear(inputs, weight, None, 40, False)
    for wrong in (bias[:40], bias.double(), torch.zeros(128)[::2]):
        with pytest.raises(RuntimeError, match="bias must be"):
            linear(inputs, packed, wrong, 40, False)


# --- attention -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    head_dim: int = 64
    block_size: int = 16
    group: int = 3
    kv_heads: int = 2
    window: int = 0
    softcap: float = 0.0
    layers: int = 3
    layer: int = 1

    @property
    def scaling(self) -> float:
        return 1 / math.sqrt(self.head_dim)


Share = tuple[int, int, int]
"""Which text, from which position, how many tokens."""


@dataclass
class Texts:
    """Texts of random queries, keys and values over one pool, whose every slot is NaN or infinite at first.

    No text owns block 0.
    """

    shape: Shape
    lengths: Sequence[int]
    seed: int = 0
    pool: Tensor = field(init=False)
    tables: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        shape, seed = self.shape, self.seed
        heads = shape.kv_heads * shape.group
        self.queries = [normal(heads, n, shape.head_dim, seed=seed + i) for i, n in enumerate(self.lengths)]
        self.keys = [normal(shape.kv_heads, n, shape.head_dim, seed=seed + 50 + n) for n in self.lengths]
        self.values = [normal(shape.kv_heads, n, shape.head_dim, seed=seed + 90 + n) for n in self.lengths]
        widths = [-(-n // shape.block_size) for n in self.lengths]
        blocks = list(range(1, sum(widths) + 1))
        random.Random(seed).shuffle(blocks)
        self.tables = [[blocks.pop() for _ in range(width)] for width in widths]
        size = (sum(widths) + 1, shape.kv_heads, shape.layers, 2, shape.block_size, shape.head_dim)
        self.pool = torch.full(size, math.nan, dtype=torch.bfloat16)
        self.pool[..., ::3] = math.inf

    def step(self, *shares: Share, transposed: bool = True) -> list[Tensor]:
        """What attention gives for each share, `[tokens, heads, head_dim]`."""
        rows, first = [], 0
        for _, start, count in shares:
            rows.append((first, count, start))
            first += count
        width = max(len(table) for table in self.tables)
        tables = [self.tables[text] + [0] * (width - len(self.tables[text])) for text, _, _ in shares]
        packed = [
            torch.cat([of[text][:, start : start + count] for text, start, count in shares], dim=1)
            for of in (self.queries, self.keys, self.values)
        ]
        if transposed:  # as projections leave them
            packed = [one.transpose(0, 1).contiguous().transpose(0, 1) for one in packed]
        out = torch.ops.galley.attend(
            *packed,
            self.pool,
            torch.tensor(rows, dtype=torch.int32),
            torch.tensor(tables, dtype=torch.int32),
            self.shape.layer,
            self.shape.scaling,
            self.shape.window,
            self.shape.softcap,
        )
        return list(out.split([count for _, _, count in shares]))

    def exact(self, text: int) -> tuple[Tensor, Tensor]:
        """All of a text at once in double precision, and the largest error that rounding excuses."""
        shape = self.shape
        key = self.keys[text].double().repeat_interleave(shape.group, 0)
        value = self.values[text].double().repeat_interleave(shape.group, 0)
        scores = self.queries[text].double() @ key.transpose(1, 2) * shape.scaling
        if shape.softcap:
            scores = (scores / shape.softcap).tanh() * shape.softcap
        age = torch.arange(scores.shape[1])[:, None] - torch.arange(scores.shape[1])
        hidden = age < 0
        if shape.window:
            hidden |= age >= shape.window
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
        out = weights @ value
        # Scores are float32 sums of head_dim products: their errors are small beside a weight's rounding.
        allowed = ROUNDING * out.abs() + (ROUNDING + 1e-4) * (weights @ value.abs())
        return out.transpose(0, 1), allowed.transpose(0, 1)

    def check(self, text: int, start: int, got: Tensor) -> None:
        out, allowed = self.exact(text)
        span = slice(start, start + len(got))
        assert ((got.double() - out[span]).abs() <= allowed[span]).all()

    def whole(self, text: int) -> Tensor:
        """Bits of the text as one prompt, alone in a pool of its own."""
        alone = Texts(self.shape, self.lengths, self.seed)
        return bits(alone.step((text, 0, self.lengths[text]))[0])


@pytest.mark.parametrize("block_size", [1, 5, 16])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_prompts_chunks_and_decodes_attend_rightly_side_by_side(head_dim: int, block_size: int) -> None:
    variants = [(1, 0, 0.0), (3, 0, 0.0), (8, 0, 0.0), (3, 40, 0.0), (1, 0, 2.0), (8, 7, 2.0)]
    for group, window, softcap in variants:
        shape = Shape(head_dim, block_size, group, window=window, softcap=softcap)
        texts = Texts(shape, [140, 135, 100, 1, 64])
        mixed = [(0, 80, 60), (2, 99, 1), (1, 0, 135), (3, 0, 1), (4, 63, 1)]
        first = texts.step((0, 0, 80), (2, 0, 99), (4, 0, 63))
        for (text, start, _), got in zip(mixed, texts.step(*mixed), strict=True):
            texts.check(text, start, got)
        for text, got in zip((0, 2, 4), first, strict=True):
            texts.check(text, 0, got)


def test_a_wide_group_of_heads_and_a_long_text() -> None:
    texts = Texts(Shape(32, group=MOST_GROUP, kv_heads=1), [700])
    texts.check(0, 0, texts.step((0, 0, 700))[0])


@pytest.mark.parametrize("window", [1, 2, 31, 64, 65, 1000])
def test_windows_of_any_width(window: int) -> None:
    texts = Texts(Shape(32, window=window), [200])
    texts.check(0, 0, texts.step((0, 0, 200))[0])


def test_large_scores_do_not_overflow() -> None:
    texts = Texts(Shape(32), [70])
    texts.queries = [query * 100 for query in texts.queries]
    (got,) = texts.step((0, 0, 70))
    assert got.isfinite().all()
    out, allowed = texts.exact(0)
    assert ((got.double() - out).abs() <= 2 * allowed).all()


@pytest.mark.parametrize("block_size", [1, 5, 16])
def test_keys_and_values_go_to_their_slots_and_nowhere_else(block_size: int) -> None:
    shape = Shape(32, block_size)
    texts = Texts(shape, [33, 70, 9])
    expected = texts.pool.clone()
    for text, start, count in [(0, 0, 33), (1, 0, 50), (2, 0, 8)]:
        for position in range(start, start + count):
            block, slot = texts.tables[text][position // block_size], position % block_size
            expected[block, :, shape.layer, 0, slot] = texts.keys[text][:, position]
            expected[block, :, shape.layer, 1, slot] = texts.values[text][:, position]
    texts.step((0, 0, 33), (1, 0, 50), (2, 0, 8))
    assert torch.equal(bits(texts.pool), bits(expected))


@st.composite
def splits(draw: st.DrawFn) -> tuple[list[int], list[list[Share]]]:
    """Texts, and steps that compute them to their ends in pieces, in any company."""
    lengths = draw(st.lists(st.integers(1, 150), min_size=1, max_size=3))
    done = [0] * len(lengths)
    steps: list[list[Share]] = []
    while any(left := [n - d for n, d in zip(lengths, done, strict=True)]):
        counts = [
            min(rest, draw(st.sampled_from((0, 1, 2, 31, 33, 64, 150)), label="tokens")) for rest in left
        ]
        if not any(counts):
            counts = left
        shares = [(i, done[i], count) for i, count in enumerate(counts) if count]
        steps.append(draw(st.permutations(shares)))
        done = [d + count for d, count in zip(done, counts, strict=True)]
    return lengths, steps


SHAPES = (
    Shape(),
    Shape(32, block_size=5, group=8, kv_heads=1),
    Shape(96, block_size=1, group=1, window=40),
    Shape(128, window=65, softcap=3.0),
    Shape(256, block_size=5, group=1, kv_heads=1),
)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@settings(max_examples=40)
@given(plan=splits())
def test_a_tokens_bits_do_not_depend_on_how_it_is_computed(
    shape: Shape, plan: tuple[list[int], list[list[Share]]]
) -> None:
    lengths, steps = plan
    texts = Texts(shape, lengths)
    whole = [texts.whole(text) for text in range(len(lengths))]
    for step in steps:
        for (text, start, count), got in zip(step, texts.step(*step), strict=True):
            assert torch.equal(bits(got), whole[text][start : start + count])


def test_bits_do_not_depend_on_strides_and_threads() -> None:
    shares = [(0, 0, 90), (1, 0, 40)]
    expected = torch.cat(Texts(SHAPES[0], [90, 40]).step(*shares))
    straight = torch.cat(Texts(SHAPES[0], [90, 40]).step(*shares, transposed=False))
    assert torch.equal(bits(straight), bits(expected))
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        threaded = torch.cat(Texts(SHAPES[0], [90, 40]).step(*shares))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(bits(threaded), bits(expected))


def test_a_text_of_nan_harms_itself_alone() -> None:
    texts = Texts(SHAPES[0], [70, 40])
    texts.keys[0][:, 30], texts.values[0][:, 30] = math.nan, math.nan
    first, second = texts.step((0, 0, 70), (1, 0, 40))
    assert first[30:].isnan().all()
    texts.check(1, 0, second)


def test_tokens_of_no_row_get_zeros_and_write_nothing() -> None:
    texts = Texts(SHAPES[0], [1])
    query, key, value = (of[0].repeat(1, 2, 1) for of in (texts.queries, texts.keys, texts.values))
    rows = torch.tensor([[0, 1, 0], [0, 0, 0]], dtype=torch.int32)
    tables = torch.tensor([[1, 0], [0, 0]], dtype=torch.int32)
    before = texts.pool.clone()
    out = torch.ops.galley.attend(query, key, value, texts.pool, rows, tables, 1, 0.125, 0, 0.0)
    assert not out[1].any()
    texts.check(0, 0, out[:1])
    changed = (bits(before) != bits(texts.pool)).view(2, 2, 3, 2, 16, -1).any(-1).nonzero().tolist()
    assert changed == [[1, head, 1, half, 0] for head in range(2) for half in range(2)]


def attend_with(**changed: object) -> None:
    given = {
        "query": normal(6, 4, 64),
        "key": normal(2, 4, 64),
        "value": normal(2, 4, 64),
        "pool": torch.zeros(3, 2, 2, 2, 16, 64, dtype=torch.bfloat16),
        "rows": torch.tensor([[0, 4, 0]], dtype=torch.int32),
        "tables": torch.tensor([[1, 2]], dtype=torch.int32),
        "layer": 0,
        "scaling": 0.125,
        "window": 0,
        "softcap": 0.0,
    }
    torch.ops.galley.attend(**(given | changed))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"query": normal(6, 4, 64).float()}, "query must be bfloat16"),
        ({"key": normal(2, 4, 64).float()}, "key must be bfloat16"),
        ({"value": normal(2, 4, 64).float()}, "value must be bfloat16"),
        ({"key": normal(2, 3, 64)}, "key must be"),
        ({"value": normal(1, 4, 64)}, "value must be"),
        ({"query": normal(6, 4, 128)[:, :, ::2]}, "head_dim must be contiguous"),
        ({"query": normal(5, 4, 64)}, "5 heads"),
        ({"query": normal(2 * (MOST_GROUP + 1), 4, 64)}, "heads share keys"),
        ({"pool": torch.zeros(3, 2, 2, 2, 16, 32, dtype=torch.bfloat16)}, "pool must be"),
        ({"pool": torch.zeros(3, 2, 2, 2, 64, 16, dtype=torch.bfloat16).transpose(4, 5)}, "pool must be"),
        ({"pool": torch.zeros(3, 2, 2, 2, 16, 64)}, "pool must be bfloat16"),
        ({"layer": 2}, "no layer 2"),
        ({"layer": -1}, "no layer -1"),
        ({"rows": torch.tensor([[0, 4, 0]])}, "rows must be"),
        ({"rows": torch.zeros(1, 2, dtype=torch.int32)}, "rows must be"),
        ({"rows": torch.tensor([[0, 5, 0]], dtype=torch.int32)}, "row 0"),
        ({"rows": torch.tensor([[-1, 4, 0]], dtype=torch.int32)}, "row 0"),
        ({"rows": torch.tensor([[0, 4, 29]], dtype=torch.int32)}, "row 0"),
        ({"rows": torch.tensor([[0, 4, -4]], dtype=torch.int32)}, "row 0"),
        ({"tables": torch.tensor([[1, 2]])}, "tables must be"),
        ({"tables": torch.tensor([[1, 2], [1, 2]], dtype=torch.int32)}, "tables must be"),
        ({"tables": torch.tensor([[3, 2]], dtype=torch.int32)}, "block 3"),
        ({"tables": torch.tensor([[-1, 2]], dtype=torch.int32)}, "block -1"),
    ],
)
def test_wrong_operands_of_attention_are_refused(changed: dict[str, object], message: str) -> None:
    attend_with()
    with pytest.raises(RuntimeError, match=message):
        attend_with(**changed)


def test_other_head_dims_are_refused() -> None:
    pool = torch.zeros(3, 2, 2, 2, 16, 48, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="head_dim 48 is not 32, 64, 96, 128 or 256"):
        attend_with(query=normal(6, 4, 48), key=normal(2, 4, 48), value=normal(2, 4, 48), pool=pool)
