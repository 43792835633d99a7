"""Whether paged attention is right for a model, found out by looking at one tiny forward pass.

Not by a list of names: what reaches the attention function says it all, and the shape of keys and values too.
Knows nothing of how models are loaded and of pools.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from common.errors import UnsupportedModel

LOOKED_AT: Final = "galley_probe"
"""The attention implementation that a model must have to be probed."""

_TOKENS: Final = 4
_UNDERSTOOD: Final = (
    "scaling",
    "softcap",
    "dropout",
    "position_ids",
    "cache_position",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "return_dict",
)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Of all attention layers of a model, and of its logits."""

    num_layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int


def register() -> None:
    """Let transformers know LOOKED_AT; again does no harm."""
    AttentionInterface.register(LOOKED_AT, _attention)
    AttentionMaskInterface.register(LOOKED_AT, _mask)


def probe(module: Any, name: str) -> ModelShape:
    """Run four tokens through the model and judge by what reached the attention function.

    Raises UnsupportedModel with `name` and every objection.
    """
    if "logits_to_keep" not in inspect.signature(module.forward).parameters:
        raise UnsupportedModel(f"{name}: it cannot compute logits of chosen tokens only")
    seen = _Probe()
    ids = torch.arange(_TOKENS, device=module.device)[None]
    try:
        with torch.inference_mode():
            output = module(input_ids=ids, use_cache=False, logits_to_keep=1, galley_step=seen)
    except (RuntimeError, TypeError, ValueError, AttributeError, KeyError) as error:
        unseen = "its attention cannot be replaced by ours"
        reason = "; ".join(dict.fromkeys(seen.objections)) or (str(error) if seen.shapes else unseen)
        raise UnsupportedModel(f"{name}: {reason}") from error
    layers = module.config.get_text_config().num_hidden_layers
    shapes = set(seen.shapes.values())
    if sorted(seen.shapes) != list(range(layers)):
        seen.objections.append(f"only {len(seen.shapes)} of {layers} layers are attention with a KV cache")
    elif len(shapes) != 1 or any(key != value for *_, key, value in shapes):
        seen.objections.append("keys and values are not of one size in all layers")
    if seen.objections:
        raise UnsupportedModel(f"{name}: {'; '.join(dict.fromkeys(seen.objections))}")
    heads, kv_heads, head_dim, _ = shapes.pop()
    return ModelShape(layers, heads, kv_heads, head_dim, output.logits.shape[-1])


@dataclass(frozen=True, slots=True)
class _Mask:
    """Stands for the mask a model asked for, so that the probe sees which layers get it."""

    window: int | None
    causal: bool


@dataclass(slots=True)
class _Probe:
    """Watches one forward pass: `shapes` per layer index as (heads, kv_heads, key dim, value dim)."""

    shapes: dict[int, tuple[int, int, int, int]] = field(default_factory=dict)
    objections: list[str] = field(default_factory=list)

    def look(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: object,
        window: int | None,
        others: dict[str, object],
    ) -> None:
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int) or layer in self.shapes:
            self.objections.append("its attention layers are not numbered one by one")
            return
        self.shapes[layer] = (query.shape[1], key.shape[1], key.shape[3], value.shape[3])
        unknown = sorted(k for k, v in others.items() if v is not None and k not in _UNDERSTOOD)
        if others.get("is_causal") is True:  # what we do anyway; False is an objection
            unknown.remove("is_causal")
        if unknown:
            self.objections.append(f"its attention wants {', '.join(unknown)}")
        if not getattr(module, "is_causal", True) or (isinstance(mask, _Mask) and not mask.causal):
            self.objections.append("its attention is not causal")
        if isinstance(mask, Tensor) or (isinstance(mask, _Mask) and mask.window != window):
            self.objections.append("it masks attention in a way of its own")
        if query.shape[3] != key.shape[3] or query.shape[1] % key.shape[1]:
            self.objections.append("queries and keys differ in size")


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: object,
    *,
    galley_step: _Probe,
    sliding_window: int | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    galley_step.look(module, query, key, value, mask, sliding_window, others)
    rows, heads, tokens, _ = query.shape
    return query.new_zeros(rows, tokens, heads, value.shape[3]), None


def _mask(*, mask_function: Callable[..., object], **others: object) -> _Mask:
    zero, one = torch.tensor(0), torch.tensor(1)
    return _Mask(
        cast("int | None", others.get("local_size")), causal=not mask_function(zero, zero, zero, one)
    )
