"""A model as one compiled graph: exported from transformers' code, compiled by Inductor to a small library.

One graph serves every step: the numbers of tokens, rows and blocks are dynamic, products and attention are
our own operators (kernels.py). The library holds no weights; it is made in a process of its own
(compile_graph.py), kept in the cache directory, and given the loaded model's tensors (graph_compiler.py).
Knows nothing of plans.
"""

import hashlib
from importlib.metadata import version
from pathlib import Path
from typing import Final, cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from common.engine import interface, kernels
from common.engine.kernel_step import PagedInputs
from common.engine.products import use_kernels
from common.kv.layout import KVLayout

MADE_OF: Final = ("graph.py", "interface.py", "kernel_step.py", "products.py")
"""The files beside this one that say what is computed; a graph is made anew when one of them changes."""

_DTYPE: Final = torch.bfloat16
"""All that our operators take."""
_MOST: Final = 1 << 20
_INDUCTOR: Final[dict[str, bool | int]] = {
    "aot_inductor.package_constants_in_so": False,
    "compile_threads": 1,
    # Small buffers would become literals otherwise, with what the skeleton holds by chance.
    "always_keep_tensor_constants": True,
    "joint_graph_constant_folding": False,
}


def graph_path(directory: Path, layout: KVLayout, cache_dir: Path) -> Path:
    """Where the compiled graph of a model lies: a name made of all that it depends on."""
    digest = hashlib.blake2b((directory / "config.json").read_bytes(), digest_size=16)
    for name in MADE_OF:
        digest.update((Path(__file__).parent / name).read_bytes())
    parts = (layout, kernels.sources_digest(), version("transformers"))
    digest.update(repr((parts, sorted(kernels.cpu_features()))).encode())
    return cache_dir.expanduser() / "graphs" / f"{digest.hexdigest()}.pt2"


def compile_graph(directory: Path, layout: KVLayout, target: Path) -> None:
    """Export and compile the model of `directory` to the file `target`, without its weights.

    For a process of its own: takes all its time in Python and the C++ compiler. Raises whatever torch raises.
    """
    register_shapes()
    module = _skeleton(directory)
    pool = torch.zeros(layout.pool_shape(2), dtype=_DTYPE)
    ids, row_spans = torch.zeros(1, 8, dtype=torch.long), torch.zeros(4, 3, dtype=torch.int32)
    tables, wanted = torch.zeros(4, 4, dtype=torch.int32), torch.zeros(4, dtype=torch.long)
    tokens, num_rows, width, num_wanted, blocks = (
        torch.export.Dim(name, min=2, max=_MOST)
        for name in ("tokens", "num_rows", "width", "num_wanted", "blocks")
    )
    shapes = ({1: tokens}, {1: tokens}, {0: blocks}, {0: num_rows}, {0: num_rows, 1: width}, {0: num_wanted})
    with torch.no_grad():
        program = torch.export.export(
            _Traced(module),
            (ids, ids.clone(), pool, row_spans, tables, wanted),
            dynamic_shapes=shapes,
            strict=False,
        )
        torch._inductor.aoti_compile_and_package(
            program, package_path=str(target), inductor_configs=_INDUCTOR
        )


class _Traced(nn.Module):
    """What is exported: tensors in, float32 logits `[wanted, vocab]` out."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, ids: Tensor, positions: Tensor, pool: Tensor, row_spans: Tensor, tables: Tensor, wanted: Tensor
    ) -> Tensor:
        output = self.model(
            input_ids=ids,
            position_ids=positions,
            use_cache=False,
            galley_step=PagedInputs(pool, row_spans, tables),
            logits_to_keep=wanted,
        )
        return cast(Tensor, output.logits)[0].float()


def _skeleton(directory: Path) -> nn.Module:
    """The model with its shapes and no weights: memory that is never written costs nothing."""
    interface.register()
    config = AutoConfig.from_pretrained(directory, local_files_only=True)
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config, dtype=_DTYPE, attn_implementation=interface.PAGED)
    module.eval().requires_grad_(False)
    use_kernels(module)
    return cast(nn.Module, module.to_empty(device="cpu"))


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """What a graph of `model` may want of it, by the names that it uses."""
    traced = _Traced(model)
    return {
        **dict(traced.named_parameters(remove_duplicate=False)),
        **dict(traced.named_buffers(remove_duplicate=False)),
    }


def register_shapes() -> None:
    """Let torch know what shapes the operators answer, which tracing needs; again does no harm."""
    torch.library.register_fake("galley::linear", _linear_shape)
    torch.library.register_fake("galley::attend", _attend_shape)


def _linear_shape(x: Tensor, packed: Tensor, bias: Tensor | None, n: int, unrounded: bool) -> Tensor:  # noqa: ARG001
    return x.new_empty(*x.shape[:-1], n, dtype=torch.float32 if unrounded else x.dtype)


def _attend_shape(query: Tensor, *_others: object) -> Tensor:
    return query.new_empty(query.shape[1], query.shape[0], query.shape[2])
