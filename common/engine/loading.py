"""From a model directory to a torch module whose attention is ours; refuses what cannot be served.

Model code comes from transformers; its attention calls are redirected to `PagedStep.attend`. Whether that
is right for an architecture is found out by looking at one tiny forward pass, not by a list of names.
Knows nothing of plans and pools.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, cast

import structlog
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from common.engine import kernels
from common.engine.attention import AttentionKind, Step
from common.engine.products import pack_linears, use_kernels
from common.errors import ConfigError, UnsupportedModel
from common.kv.layout import DType

PAGED: Final = "galley_paged"
_LOOKED_AT: Final = "galley_probe"
_PROBE_TOKENS: Final = 4
_LAYER_TYPES: Final = ("full_attention", "sliding_attention")
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
_DTYPES: Final[dict[DType, torch.dtype]] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A causal language model on its device, in evaluation mode, and the shape of its keys and values."""

    module: nn.Module
    dtype: DType
    num_layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    uses_kernels: bool = False

    def logits(self, step: Step, wanted: Tensor) -> Tensor:
        """One forward pass; float32 logits `[len(wanted), vocab]` of the packed token indices `wanted`."""
        inputs = {
            "input_ids": step.input_ids,
            "position_ids": step.position_ids,
            # Ignored by PagedStep; without one transformers looks whether positions are those of several
            # texts, and waits for the GPU to know.
            "attention_mask": torch.empty(1, 1, 1, 1, device=wanted.device),
            "use_cache": False,
        }
        if len(wanted) == 0:
            body = cast(nn.Module, self.module.base_model)
            body(**inputs, galley_step=step)
            return torch.empty(0, self.vocab_size, device=wanted.device)
        output = self.module(**inputs, galley_step=step, logits_to_keep=wanted)
        return cast(Tensor, output.logits)[0].float()


def pick_device(setting: str) -> str:
    """The device meant by `setting`; "auto" takes a CUDA device if there is one. Raises ConfigError."""
    available = torch.cuda.is_available()
    if setting.startswith("cuda") and not available:
        raise ConfigError(
            f"device = {setting!r}: torch finds no CUDA device here; use cpu or auto", param="device"
        )
    if setting == "auto":
        return "cuda" if available else "cpu"
    return setting


def load_model(directory: Path, dtype: str, device: str, cache_dir: Path | None = None) -> LoadedModel:
    """Load `directory` without initialising weights twice, and check that paged attention is right for it.

    In bfloat16 on a CPU that can have them our own kernels are used, from `cache_dir` (None: torch's alone).
    `dtype` "auto" is the checkpoint's own, but bfloat16 instead of float16 on CPUs, which have no fast
    float16 product. Raises UnsupportedModel naming the architecture and the reason, and ConfigError when the
    files cannot be read.
    """
    register_attention()
    config, name = checked_config(directory)
    used = _pick_dtype(dtype, config, device)
    try:
        module = AutoModelForCausalLM.from_pretrained(
            directory,
            config=config,
            dtype=_DTYPES[used],
            attn_implementation=_LOOKED_AT,
            use_safetensors=True,
        )
    except KeyError as error:
        raise UnsupportedModel(f"{name}: its attention cannot be replaced by ours") from error
    except (ValueError, ImportError, NotImplementedError) as error:
        raise UnsupportedModel(f"{name}: {error}") from error
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"model: the weights in {directory} cannot be read: {error}") from error
    module = module.to(device).eval().requires_grad_(False)
    model = _probe(module, name, used)
    module.set_attn_implementation(PAGED)
    if device == "cpu" and used == "bfloat16":
        if cache_dir is not None and _has_kernels(model, cache_dir):
            use_kernels(module)
            return replace(model, uses_kernels=True)
        pack_linears(module)
    return model


def register_attention() -> None:
    """Let transformers know our attention functions; again does no harm."""
    transformers_logging.disable_progress_bar()
    AttentionInterface.register(PAGED, _paged_attention)
    AttentionMaskInterface.register(PAGED, _no_mask)
    AttentionInterface.register(_LOOKED_AT, _probe_attention)
    AttentionMaskInterface.register(_LOOKED_AT, _probe_mask)


def _has_kernels(model: LoadedModel, cache_dir: Path) -> bool:
    if model.head_dim not in kernels.HEAD_DIMS or model.heads > kernels.MOST_GROUP * model.kv_heads:
        reason = f"head_dim {model.head_dim} with {model.heads} heads over {model.kv_heads} has no kernel"
    else:
        try:
            kernels.load_kernels(cache_dir)
        except kernels.KernelsUnavailable as error:
            reason = str(error)
        else:
            return True
    _log.warning("torch's own operators are used, which are slower", reason=reason)
    return False


def convert_gguf(source: Path, target: Path, progress: Callable[[str], None]) -> None:
    """Write the GGUF file `source` as bfloat16 safetensors, with its tokenizer and chat template."""
    from transformers import AutoTokenizer, GenerationConfig, GgufConfig

    transformers_logging.disable_progress_bar()
    progress("1/3 reading and unpacking the weights")
    module = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    progress("2/3 reading the tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    progress("3/3 writing safetensors and tokenizer")
    module.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    module.save_pretrained(target)
    tokenizer.save_pretrained(target)


def torch_dtype(dtype: DType) -> torch.dtype:
    return _DTYPES[dtype]


def checked_config(directory: Path) -> tuple[Any, str]:
    """The configuration and the architecture's name, refusing what its JSON already rules out."""
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
    except (ValueError, KeyError, OSError) as error:
        raise UnsupportedModel(f"{directory}: {error}") from error
    name = ", ".join(config.architectures or [type(config).__name__])
    text = config.get_text_config()
    if config.is_encoder_decoder:
        raise UnsupportedModel(f"{name}: encoder-decoder models are not served")
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise UnsupportedModel(f"{name}: not a causal language model")
    other = sorted(set(getattr(text, "layer_types", None) or ()) - set(_LAYER_TYPES))
    if other:
        raise UnsupportedModel(f"{name}: layers of type {', '.join(other)} are not served")
    return config, name


def _pick_dtype(setting: str, config: Any, device: str) -> DType:
    if setting != "auto":
        if setting not in _DTYPES:
            raise UnsupportedModel(f"dtype {setting}: allowed are auto, {', '.join(_DTYPES)}")
        return setting
    stored = str(config.get_text_config().dtype or config.dtype or "float32").removeprefix("torch.")
    if stored == "float16" and device == "cpu":
        return "bfloat16"
    return stored if stored in _DTYPES else "float32"


# --- what transformers calls -----------------------------------------------------------------------


def _paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: object,
    *,
    galley_step: Step,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_others: object,
) -> tuple[Tensor, None]:
    """An AttentionInterface function: `[1, heads, tokens, dim]` in, `[1, tokens, heads, dim]` out."""
    kind = AttentionKind(query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap)
    out = galley_step.attend(cast(int, module.layer_idx), query[0], key[0], value[0], kind)
    return out[None], None


def _no_mask(**_arguments: object) -> None:
    """An AttentionMaskInterface function: PagedStep makes the masks."""


def _probe_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: object,
    *,
    galley_step: "_Probe",
    sliding_window: int | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    galley_step.look(module, query, key, value, mask, sliding_window, others)
    rows, heads, tokens, _ = query.shape
    return query.new_zeros(rows, tokens, heads, value.shape[3]), None


def _probe_mask(*, mask_function: Callable[..., object], **others: object) -> "_Mask":
    zero, one = torch.tensor(0), torch.tensor(1)
    return _Mask(
        cast("int | None", others.get("local_size")), causal=not mask_function(zero, zero, zero, one)
    )


# --- the probe -------------------------------------------------------------------------------------


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


def _probe(module: Any, name: str, dtype: DType) -> LoadedModel:
    """Run four tokens through the model and judge by what reached the attention function."""
    if "logits_to_keep" not in inspect.signature(module.forward).parameters:
        raise UnsupportedModel(f"{name}: it cannot compute logits of chosen tokens only")
    probe = _Probe()
    ids = torch.arange(_PROBE_TOKENS, device=module.device)[None]
    try:
        with torch.inference_mode():
            output = module(input_ids=ids, use_cache=False, logits_to_keep=1, galley_step=probe)
    except (RuntimeError, TypeError, ValueError, AttributeError, KeyError) as error:
        unseen = "its attention cannot be replaced by ours"
        reason = "; ".join(dict.fromkeys(probe.objections)) or (str(error) if probe.shapes else unseen)
        raise UnsupportedModel(f"{name}: {reason}") from error
    layers = module.config.get_text_config().num_hidden_layers
    shapes = set(probe.shapes.values())
    if sorted(probe.shapes) != list(range(layers)):
        probe.objections.append(f"only {len(probe.shapes)} of {layers} layers are attention with a KV cache")
    elif len(shapes) != 1 or any(key != value for *_, key, value in shapes):
        probe.objections.append("keys and values are not of one size in all layers")
    if probe.objections:
        raise UnsupportedModel(f"{name}: {'; '.join(dict.fromkeys(probe.objections))}")
    heads, kv_heads, head_dim, _ = shapes.pop()
    return LoadedModel(module, dtype, layers, heads, kv_heads, head_dim, output.logits.shape[-1])
