"""Decode steps of fixed shapes, on a CPU: what is replayed there is simply computed again.

Against the step that is packed for each plan, and against transformers' own generate.
"""

import random
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from common.engine import cuda_graphs
from common.engine.attention import PagedPool, PagedStep
from common.engine.cuda_graphs import Compute, DecodeGraphs, RecordingFailed, bucket_sizes
from common.engine.decode_step import DecodeInputs
from common.engine.interface import AttentionKind
from common.engine.loading import LoadedModel, load_model
from common.engine.paged_decode import GatheredDecode, find_kernel, why_not
from common.engine.runner import PlanRow
from common.engine.staging import to_device
from common.ids import BlockId, SequenceId
from common.kv.layout import KVLayout
from tests.support.paged_reference import attend_plainly, random_case
from tests.support.tiny_models import CONTEXT, KINDS, VOCAB, make_tiny_model
from tests.support.torch_driver import GREEDY

BLOCK = 16
SCRATCH = 200
CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    torch.set_num_threads(1)
    return load_model(make_tiny_model(request.param, tmp_path_factory.mktemp("m"), seed=3), "float32", "cpu")


def pool_for(model: LoadedModel) -> PagedPool:
    """A pool with other people's finite numbers in it."""
    shape = model.shape
    layout = KVLayout(shape.kv_heads, shape.num_layers, BLOCK, shape.head_dim, "float32")
    return PagedPool(torch.randn(layout.pool_shape(SCRATCH + 1)), layout)


def again(compute: Compute) -> Compute:
    compute()
    return compute


def graphs_of(model: LoadedModel, pool: PagedPool, **others: Any) -> DecodeGraphs:
    settings: dict[str, Any] = {"max_rows": 20, "max_len": 600, "kernel": None, "record": again}
    return DecodeGraphs(model, pool, scratch=SCRATCH, **(settings | others))


def row_of(number: int, length: int, blocks: Iterator[int]) -> PlanRow:
    """The last token of a text of `length` tokens."""
    source = random.Random(length)
    tokens = [source.randrange(3, VOCAB) for _ in range(length)]
    table = tuple(BlockId(next(blocks)) for _ in range(-(-length // BLOCK)))
    return PlanRow(SequenceId(number), tokens, length - 1, 1, length, table, True, 0, GREEDY)


def rows_of(lengths: list[int]) -> list[PlanRow]:
    order = list(range(SCRATCH))
    random.Random(len(lengths)).shuffle(order)
    blocks = iter(order)
    return [row_of(number, length, blocks) for number, length in enumerate(lengths)]


# --- sizes and numbers -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("most", "expected"),
    [(1, [1]), (2, [1, 2]), (7, [1, 2, 4, 7]), (8, [1, 2, 4, 8]), (33, [1, 2, 4, 8, 16, 24, 32, 33])],
)
def test_sizes_end_with_the_most_there_can_be(most: int, expected: list[int]) -> None:
    assert bucket_sizes(most) == expected


def test_numbers_of_a_step() -> None:
    memory = torch.full((DecodeInputs.size_of(4, 3),), 9)
    inputs = DecodeInputs(memory, 4, BLOCK, 9)
    rows = [row_of(0, 17, iter([5, 6])), row_of(1, 16, iter([7]))]
    assert inputs.fill(rows).tolist() == [6]
    assert inputs.numbers.tolist() == [
        [rows[0].tokens[16], rows[1].tokens[15], 0, 0],
        [16, 15, 0, 0],  # positions
        [6, 7, 9, 9],  # blocks written to
        [0, 15, 0, 0],  # at these slots
        [17, 16, 1, 1],  # lengths
        [6, 0, 0, 0],  # blocks begun
        [5, 7, 9, 9],
        [6, 9, 9, 9],
        [9, 9, 9, 9],
    ]
    before = inputs.numbers.data_ptr()
    assert inputs.fill([]).tolist() == []
    assert inputs.numbers[2:5].tolist() == [[9] * 4, [0] * 4, [1] * 4]
    assert inputs.numbers.data_ptr() == before


def test_parts_of_one_copy() -> None:
    parts = to_device([[1, 2], [], torch.arange(3).numpy()], CPU)
    assert [part.tolist() for part in parts] == [[1, 2], [], [0, 1, 2]]
    assert len({part.untyped_storage().data_ptr() for part in parts}) == 1


# --- attention -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heads", "window", "softcap", "dtype"),
    list(product([(4, 4), (6, 3), (8, 1)], [None, 40], [None, 5.0], ["float32", "bfloat16"])),
)
def test_the_fallback_is_right(
    heads: tuple[int, int], window: int | None, softcap: float | None, dtype: Any
) -> None:
    case = random_case(KVLayout(heads[1], 2, BLOCK, 64, dtype), heads[0], CPU)
    kind = AttentionKind(0.1, window, softcap)
    found = GatheredDecode(case.pool, case.tables, case.lengths).attend(1, case.query, kind)
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    torch.testing.assert_close(found.float(), attend_plainly(case, 1, kind), rtol=tolerance, atol=tolerance)


def test_a_kernel_that_errs_is_not_used() -> None:
    class Wrong(GatheredDecode):
        def attend(self, layer: int, query: Tensor, kind: AttentionKind) -> Tensor:
            return super().attend(layer, query, kind) + 1

    class Broken(GatheredDecode):
        def attend(self, layer: int, query: Tensor, kind: AttentionKind) -> Tensor:
            raise OSError("no C compiler")

    pool = random_case(KVLayout(2, 2, BLOCK, 16, "float32"), 4, CPU).pool
    assert why_not(GatheredDecode, pool, 4) == ""
    assert why_not(Wrong, pool, 4) == "the kernel computes something else"
    assert "OSError: no C compiler" in why_not(Broken, pool, 4)


def test_without_triton_there_is_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "common.engine.triton_decode", None)
    assert find_kernel(random_case(KVLayout(2, 2, BLOCK, 16, "float32"), 4, CPU).pool, 4) is None


# --- whole steps -----------------------------------------------------------------------------------


def test_replayed_steps_equal_packed_ones(model: LoadedModel) -> None:
    pool = pool_for(model)
    graphs = graphs_of(model, pool)
    lengths = [1, 2, 16, 17, 33, 48, 49, 100, 255, 256, 257, 300, 31, 32, 33, 7, 8, 400]
    for count in (1, 2, 3, 5, 8, 9, 18):
        rows = rows_of(lengths[:count])
        assert graphs.takes(rows)
        untouched = pool.tensor.clone()
        found = graphs.logits(rows).clone()
        written = pool.tensor.clone()
        pool.tensor.copy_(untouched)
        with torch.inference_mode():
            step = PagedStep(pool, rows)
            expected = model.logits(step, torch.arange(count))[[step.order.index(i) for i in range(count)]]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(written[:SCRATCH], pool.tensor[:SCRATCH], rtol=1e-4, atol=1e-4)


def test_a_kernel_may_serve_the_packed_steps_too(model: LoadedModel) -> None:
    pool = pool_for(model)
    rows = rows_of([40, 300, 1, 77])
    rows[1] = PlanRow(
        rows[1].seq, rows[1].tokens, 250, 50, 300, rows[1].blocks, sample=True, choice=0, sampling=GREEDY
    )
    with torch.inference_mode():
        plain, through = PagedStep(pool, rows), PagedStep(pool, rows, GatheredDecode)
        wanted = torch.tensor([end - 1 for end in plain.ends])
        expected = model.logits(plain, wanted)
        torch.testing.assert_close(model.logits(through, wanted), expected, rtol=1e-4, atol=1e-4)


def test_only_recorded_decode_steps_are_taken(model: LoadedModel) -> None:
    graphs = graphs_of(model, pool_for(model), max_rows=3)
    assert graphs.sizes == (1, 2, 3)
    rows = rows_of([20, 30, 40, 50])
    assert graphs.takes(rows[:3])
    assert not graphs.takes(rows)
    chunk = PlanRow(rows[0].seq, rows[0].tokens, 10, 10, 20, rows[0].blocks, True, 0, GREEDY)
    assert not graphs.takes([rows[1], chunk])


def test_the_least_size_that_holds_a_batch_is_replayed(model: LoadedModel) -> None:
    computed: list[int] = []

    def noting(compute: Compute) -> Compute:
        def noted() -> Tensor:
            logits = compute()
            computed.append(len(logits))
            return logits

        return noted

    graphs = graphs_of(model, pool_for(model), record=noting)
    for count in (1, 2, 3, 4, 5, 8, 9, 16, 17, 20):
        assert len(graphs.logits(rows_of([30] * count))) == count
    assert computed == [1, 2, 4, 4, 8, 8, 16, 16, 20, 20]


def test_the_fallback_gathers_within_limits(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pool_for(model)
    width = pool.layout.blocks_for(CONTEXT)
    one = GatheredDecode.workspace_bytes(pool.layout, 1, width)
    monkeypatch.setattr(cuda_graphs, "_GATHER_LIMIT", 5 * one)
    assert graphs_of(model, pool, max_len=CONTEXT).sizes == (1, 2, 4)
    monkeypatch.setattr(cuda_graphs, "_GATHER_LIMIT", one - 1)
    with pytest.raises(RecordingFailed, match="too much memory"):
        graphs_of(model, pool, max_len=CONTEXT)
