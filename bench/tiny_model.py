"""A random model so small that a cluster of it is all overhead: for benches of what stands around the model.

One byte is one token. Needs the `engine` extra. Knows nothing of what is measured with it.
"""

from pathlib import Path

CONTEXT = 1024
VOCAB_SIZE = 320
FIRST_BYTE = 3
"""Below are the special tokens."""
_SPECIAL = ("<|pad|>", "<|start|>", "<|end|>")


def save_tiny_model(directory: Path) -> Path:
    """Write it in float32 to `directory`, always the same weights. Takes seconds: not for the loop."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    config = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=16,
        max_position_embeddings=CONTEXT,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    transformers.set_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(directory)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {name: number for number, name in enumerate([*_SPECIAL, *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    pad, start, end = _SPECIAL
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad, bos_token=start, eos_token=end
    ).save_pretrained(directory)
    return directory
