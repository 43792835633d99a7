"""What transformers itself says: the greedy tokens of `generate`, and which others would be as right.

Knows nothing of Galley.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

TIE: Final = 1e-4
"""Logits this close are the same to float32 arithmetic done in another order."""

_PADDING: Final = 64


@dataclass(frozen=True, slots=True)
class Expected:
    """`right[i]` are the tokens whose logits lie within TIE of the best at output position i, which is
    that of `tokens[i]`."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    right: tuple[frozenset[int], ...]


def generate(directory: Path, prompts: Sequence[tuple[int, ...]], count: int) -> list[Expected]:
    """`count` tokens after each of `prompts` in float32, an end-of-text token among them or not.

    Ordered by length. Prompts whose lengths are near each other are one left-padded batch.
    """
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more wait for each other, when other processes have the cores
    try:
        ordered = sorted(prompts, key=len)
        batches = groupby(ordered, lambda prompt: len(prompt) // _PADDING)
        return [one for _, batch in batches for one in _batch(model, list(batch), count)]
    finally:
        torch.set_num_threads(threads)


def _batch(model: Any, prompts: list[tuple[int, ...]], count: int) -> Iterator[Expected]:
    longest = max(map(len, prompts))
    missing = [longest - len(prompt) for prompt in prompts]
    ids = torch.tensor([[0] * n + list(prompt) for n, prompt in zip(missing, prompts, strict=True)])
    mask = torch.tensor([[0] * n + [1] * len(prompt) for n, prompt in zip(missing, prompts, strict=True)])
    config = GenerationConfig(
        max_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    output = model.generate(ids, attention_mask=mask, generation_config=config)
    logits = torch.stack(output.logits, dim=1)
    near = logits >= logits.amax(dim=-1, keepdim=True) - TIE
    for row, prompt in enumerate(prompts):
        tokens = tuple(output.sequences[row, longest:].tolist())
        yield Expected(prompt, tokens, tuple(frozenset(_where(position)) for position in near[row]))


def _where(flags: torch.Tensor) -> list[int]:
    found: list[int] = flags.nonzero().flatten().tolist()
    return found
