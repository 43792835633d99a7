"""What a graph is made of, and that its name tells all of it. Nothing is compiled."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch import Tensor, nn

from common.engine import graph, kernels
from common.engine.graph import MADE_OF, compile_graph, graph_path, register_shapes
from common.kv.layout import KVLayout
from tests.support.tiny_models import make_tiny_model

LAYOUT = KVLayout(kv_heads=3, num_layers=3, block_size=16, head_dim=32, dtype="bfloat16")
ENGINE = Path(graph.__file__).parent


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("llama"), head_dim=32)


def test_a_graph_is_named_by_what_it_depends_on(
    tmp_path: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = json.loads((directory / "config.json").read_text())
    (tmp_path / "config.json").write_text((directory / "config.json").read_text())
    usual = graph_path(directory, LAYOUT, tmp_path)
    assert usual.parent == tmp_path / "graphs"
    assert graph_path(tmp_path, replace(LAYOUT), tmp_path) == usual
    paths = {usual}
    for changed in ({"block_size": 8}, {"dtype": "float32"}, {"num_layers": 4}):
        paths.add(graph_path(directory, replace(LAYOUT, **changed), tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    paths.add(graph_path(tmp_path, LAYOUT, tmp_path))
    for name, value in (("sources_digest", lambda: "other"), ("cpu_features", lambda: {"avx512_bf16"})):
        with monkeypatch.context() as patch:
            patch.setattr(kernels, name, value)
            paths.add(graph_path(directory, LAYOUT, tmp_path))
    monkeypatch.setattr(graph, "version", lambda package: "0.0")
    paths.add(graph_path(directory, LAYOUT, tmp_path))
    assert len(paths) == 8


@pytest.mark.parametrize("changed", MADE_OF)
def test_a_graph_is_named_by_the_files_that_make_it(
    changed: str, tmp_path: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = graph_path(directory, LAYOUT, tmp_path)
    for name in MADE_OF:
        shutil.copy(ENGINE / name, tmp_path)
    monkeypatch.setattr(graph, "__file__", str(tmp_path / "graph.py"))
    assert graph_path(directory, LAYOUT, tmp_path) == usual
    with (tmp_path / changed).open("a") as source:
        source.write("# changed\n")
    assert graph_path(directory, LAYOUT, tmp_path) != usual


@pytest.mark.kernels
@pytest.mark.usefixtures("operators")
def test_no_other_file_of_ours_makes_it(
    tmp_path: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that runs of the engine until the model is exported, and in the pass that exporting traces."""
    ran: set[Path] = set()

    class Traced(Exception):
        pass

    def note(frame: FrameType, event: str, argument: object) -> None:
        ran.add(Path(frame.f_code.co_filename))

    def run(module: nn.Module, inputs: tuple[Tensor, ...], **_: object) -> None:
        module(*inputs)
        raise Traced

    monkeypatch.setattr(torch.export, "export", run)
    sys.setprofile(note)
    try:
        with pytest.raises(Traced):
            compile_graph(directory, LAYOUT, tmp_path / "made")
    finally:
        sys.setprofile(None)
    assert {path.name for path in ran if path.parent == ENGINE} == set(MADE_OF)


@pytest.mark.kernels
@pytest.mark.usefixtures("operators")
def test_the_shapes_that_tracing_goes_by_are_the_real_ones() -> None:
    register_shapes()
    linear, attend = torch.ops.galley.linear, torch.ops.galley.attend
    inputs, packed = torch.zeros(2, 5, 48).bfloat16(), torch.ops.galley.pack(torch.zeros(70, 48).bfloat16())
    for unrounded in (False, True):
        real = linear(inputs, packed, None, 70, unrounded)
        fake = linear(inputs.to("meta"), packed.to("meta"), None, 70, unrounded)
        assert (fake.shape, fake.dtype) == (real.shape, real.dtype)
    query, key = (torch.zeros(heads, 3, 32).bfloat16() for heads in (4, 2))
    pool = torch.zeros(2, 2, 1, 2, 16, 32).bfloat16()
    rows, tables = torch.tensor([[0, 3, 0]], dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
    operands = (query, key, key, pool, rows, tables)
    real = attend(*operands, 0, 1.0, 0, 0.0)
    fake = attend(*(one.to("meta") for one in operands), 0, 1.0, 0, 0.0)
    assert (fake.shape, fake.dtype) == (real.shape, real.dtype) == ((3, 4, 32), torch.bfloat16)
