"""Tiny random models on disk, complete enough to be served: config, safetensors, tokenizer, chat template.

One byte is one token, so any text works, and 600 tokens are quickly computed. Knows nothing of the engine.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast

KINDS: Final = ("llama", "qwen3", "mistral", "gemma3", "gpt_neox", "gemma2", "gpt2", "phi3", "olmo2")
"""Decoder-only models the engine serves; mistral, gemma2 and gemma3 slide a window of 32 tokens."""

CONTEXT: Final = 1024
WINDOW: Final = 32
VOCAB: Final = 320
SPECIAL: Final = ("<|pad|>", "<|start|>", "<|end|>")
END_ID: Final = 2

CHAT_TEMPLATE: Final = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def make_tiny_model(kind: str, directory: Path, seed: int = 0, **overrides: Any) -> Path:
    """Save a random model of `kind` in float32 to `directory` and return it; equal seeds, equal weights.

    `overrides` go to the configuration's constructor.
    """
    config = _CONFIGS[kind](**overrides)
    # Wide weights, so that greedy tokens differ from each other and ties are far away.
    config.initializer_range = 0.3
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    module.generation_config = GenerationConfig(pad_token_id=0, bos_token_id=1, eos_token_id=END_ID)
    module.save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return directory


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes as tokens, after three special ones; decode(encode(text)) is text."""
    names = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {name: number for number, name in enumerate([*SPECIAL, *names])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    pad, start, end = SPECIAL
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        bos_token=start,
        eos_token=end,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def _common(**more: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "max_position_embeddings": CONTEXT,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": END_ID,
        # With random weights, a model whose output is its input embedding repeats the last token for ever.
        "tie_word_embeddings": False,
        **more,
    }


def _grouped(**more: Any) -> dict[str, Any]:
    return _common(num_key_value_heads=3, head_dim=16, **more)


def _layers(*types: str) -> list[str]:
    return [f"{kind}_attention" for kind in types]


_CONFIGS: Final[dict[str, Callable[..., Any]]] = {
    "llama": lambda **o: transformers.LlamaConfig(**(_grouped() | o)),
    "qwen3": lambda **o: transformers.Qwen3Config(**(_grouped() | o)),
    "mistral": lambda **o: transformers.MistralConfig(**(_grouped(sliding_window=WINDOW) | o)),
    "gemma3": lambda **o: transformers.Gemma3TextConfig(
        **(_grouped(sliding_window=WINDOW, layer_types=_layers("sliding", "full", "sliding")) | o)
    ),
    "gemma2": lambda **o: transformers.Gemma2Config(
        **(_grouped(sliding_window=WINDOW, layer_types=_layers("sliding", "full", "sliding")) | o)
    ),
    "gpt_neox": lambda **o: transformers.GPTNeoXConfig(**(_common() | o)),
    "gpt2": lambda **o: transformers.GPT2Config(
        **(
            {"vocab_size": VOCAB, "n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": CONTEXT}
            | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": END_ID}
            | o
        )
    ),
    "phi3": lambda **o: transformers.Phi3Config(**(_common(num_key_value_heads=3) | o)),
    "olmo2": lambda **o: transformers.Olmo2Config(**(_common(num_key_value_heads=3) | o)),
}
