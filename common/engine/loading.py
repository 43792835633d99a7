"""From a model directory to a torch module whose attention is ours; refuses what cannot be served.

Model code comes from transformers; its attention is replaced (interface.py), where that is right for it
(probe.py). Knows nothing of plans and pools.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import structlog
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from common.engine import interface, kernels, probe
from common.engine.interface import PAGED, Step
from common.engine.probe import ModelShape
from common.engine.products import pack_linears, use_kernels
from common.errors import ConfigError, UnsupportedModel
from common.kv.layout import DType

_LAYER_TYPES: Final = ("full_attention", "sliding_attention")
_DTYPES: Final[dict[DType, torch.dtype]] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A causal language model on its device, in evaluation mode."""

    module: nn.Module
    dtype: DType
    shape: ModelShape
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
            return torch.empty(0, self.shape.vocab_size, device=wanted.device)
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
    interface.register()
    probe.register()
    transformers_logging.disable_progress_bar()
    config, name = _checked_config(directory)
    used = _pick_dtype(dtype, config, device)
    try:
        module = AutoModelForCausalLM.from_pretrained(
            directory,
            config=config,
            dtype=_DTYPES[used],
            attn_implementation=probe.LOOKED_AT,
            use_safetensors=True,
        )
    except KeyError as error:
        raise UnsupportedModel(f"{name}: its attention cannot be replaced by ours") from error
    except (ValueError, ImportError, NotImplementedError) as error:
        raise UnsupportedModel(f"{name}: {error}") from error
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"model: the weights in {directory} cannot be read: {error}") from error
    module = module.to(device).eval().requires_grad_(False)
    shape = probe.probe(module, name)
    module.set_attn_implementation(PAGED)
    uses_kernels = False
    if device == "cpu" and used == "bfloat16":
        uses_kernels = cache_dir is not None and _has_kernels(shape, cache_dir)
        (use_kernels if uses_kernels else pack_linears)(module)
    return LoadedModel(module, used, shape, uses_kernels)


def _has_kernels(shape: ModelShape, cache_dir: Path) -> bool:
    if shape.head_dim not in kernels.HEAD_DIMS or shape.heads > kernels.MOST_GROUP * shape.kv_heads:
        reason = f"head_dim {shape.head_dim} with {shape.heads} heads over {shape.kv_heads} has no kernel"
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


def _checked_config(directory: Path) -> tuple[Any, str]:
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
