"""What is refused, and that repacked weights compute what plain ones do."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from common.engine.loading import load_model
from common.engine.products import pack_linears
from common.errors import ConfigError, UnsupportedModel
from tests.support.tiny_models import make_tiny_model

SMALL: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "max_position_embeddings": 256,
}
UNSUPPORTED: dict[str, tuple[transformers.PreTrainedConfig, str]] = {
    "encoder": (transformers.BertConfig(**SMALL), "not causal"),
    "encoder-decoder": (
        transformers.BartConfig(d_model=48, encoder_layers=1, decoder_layers=1),
        "encoder-decoder",
    ),
    "state space": (transformers.MambaConfig(vocab_size=320, hidden_size=48, num_hidden_layers=2), "linear"),
    "latent attention": (
        transformers.DeepseekV3Config(
            **SMALL,
            num_key_value_heads=6,
            n_routed_experts=4,
            num_experts_per_tok=1,
            n_group=1,
            topk_group=1,
            moe_intermediate_size=32,
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=8,
        ),
        "keys and values",
    ),
    "attention sinks": (
        transformers.GptOssConfig(
            **SMALL, num_key_value_heads=3, head_dim=16, num_local_experts=2, num_experts_per_tok=1
        ),
        "s_aux",
    ),
    "alibi": (
        transformers.BloomConfig(vocab_size=320, hidden_size=48, n_layer=2, n_head=6),
        "cannot be replaced",
    ),
}


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_what_cannot_work_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    config, reason = UNSUPPORTED[kind]
    automatic = (
        transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    )
    module = automatic.from_config(config)
    module.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=f"^{type(module).__name__}: .*{reason}"):
        load_model(tmp_path, "float32", "cpu")


def test_chunked_attention_is_refused(tmp_path: Path) -> None:
    make_tiny_model("llama", tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(
        json.dumps(config | {"layer_types": ["full_attention", "chunked_attention", "full_attention"]})
    )
    with pytest.raises(UnsupportedModel, match="chunked_attention"):
        load_model(tmp_path, "float32", "cpu")


def test_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "perpetuum_mobile"}')
    with pytest.raises(UnsupportedModel, match="perpetuum_mobile"):
        load_model(tmp_path, "float32", "cpu")


@pytest.mark.parametrize("size", [None, 0, 20_000])
def test_weights_that_are_missing_or_cut_short_are_told_so(size: int | None, tmp_path: Path) -> None:
    weights = make_tiny_model("llama", tmp_path) / "model.safetensors"
    if size is None:
        weights.unlink()
    else:
        weights.write_bytes(weights.read_bytes()[:size])
    with pytest.raises(ConfigError, match=r"weights .* cannot be read"):
        load_model(tmp_path, "float32", "cpu")


@pytest.mark.parametrize(
    ("stored", "setting", "used"),
    [
        ("float32", "auto", "float32"),
        ("bfloat16", "auto", "bfloat16"),
        ("float16", "auto", "bfloat16"),
        ("float32", "bfloat16", "bfloat16"),
    ],
)
def test_dtype(stored: str, setting: str, used: str, tmp_path: Path) -> None:
    make_tiny_model("llama", tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"dtype": stored}))
    assert load_model(tmp_path, setting, "cpu").dtype == used


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", [1, 8, 200])
def test_packed_weights_compute_what_plain_ones_do(bias: bool, tokens: int) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(96, 130, bias=bias, dtype=torch.bfloat16)
    holder = nn.Sequential(linear, nn.SiLU())
    inputs = torch.randn(1, tokens, 96, dtype=torch.bfloat16)
    with torch.inference_mode():
        expected = nn.functional.linear(
            inputs.double(), linear.weight.double(), linear.bias.double() if bias else None
        )
        pack_linears(holder)
        assert not list(holder.parameters())[bias:]
        assert torch.allclose(holder[0](inputs).double(), expected, atol=0.02, rtol=0.01)
