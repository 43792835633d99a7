"""Plain transformers as a contender: its forward with DynamicCache, sdpa, bfloat16, inference mode.

Nothing of ours takes part in it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from bench.engine.cells import ModelShape


class PlainTransformers:
    """Implements Contender. Greedy sampling; the logits of the last position only, as `generate` asks for."""

    def __init__(self, directory: Path, seed: int = 0) -> None:
        module = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.bfloat16, attn_implementation="sdpa", use_safetensors=True
        )
        self._module: Any = module.eval().requires_grad_(False)
        self._generator = torch.Generator().manual_seed(seed)
        self._cache: Any = None
        self._context = 0
        self._next = torch.empty(0)

    @property
    def shape(self) -> ModelShape:
        config = self._module.config.get_text_config()
        parameters = sum(parameter.numel() for parameter in self._module.parameters())
        ends = {
            id(layer.weight): layer.weight.numel()
            for layer in (self._module.get_input_embeddings(), self._module.get_output_embeddings())
        }
        return ModelShape(
            parameters=parameters,
            body_parameters=parameters - sum(ends.values()),
            layers=config.num_hidden_layers,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=self._head_dim,
            hidden=config.hidden_size,
            vocab=config.vocab_size,
        )

    @property
    def _head_dim(self) -> int:
        config = self._module.config.get_text_config()
        stated = getattr(config, "head_dim", None)
        return int(stated or config.hidden_size // config.num_attention_heads)

    @torch.inference_mode()
    def prefill(self, tokens: Sequence[int]) -> None:
        self._forward(torch.tensor([list(tokens)]), DynamicCache())

    @torch.inference_mode()
    def logprobs(self, tokens: Sequence[int]) -> list[float]:
        """The log probability of every token but the first."""
        ids = torch.tensor([list(tokens)])
        logits = self._module(ids, use_cache=False).logits[0, :-1].float()
        own: list[float] = torch.log_softmax(logits, -1).gather(-1, ids[0, 1:, None])[:, 0].tolist()
        return own

    @torch.inference_mode()
    def fill(self, batch: int, context: int) -> None:
        # The last token of the context is the first to be computed, as it is in our engine.
        self._context, cache, shape = context - 1, DynamicCache(), self.shape
        size = (batch, shape.kv_heads, self._context, shape.head_dim)
        for layer in range(shape.layers):
            cache.update(self._random(size), self._random(size), layer)
        self._cache = cache
        self._next = torch.randint(shape.vocab, (batch, 1), generator=self._generator)

    @torch.inference_mode()
    def rewind(self) -> None:
        if grown := self._cache.get_seq_length() - self._context:
            self._cache.crop(-grown)

    @torch.inference_mode()
    def step(self) -> None:
        before = self._cache.get_seq_length()
        self._next = self._forward(self._next, self._cache)
        if self._cache.get_seq_length() != before + 1:  # what was timed would be no decode step
            raise RuntimeError("transformers did not add the step's token to the cache")

    def _forward(self, ids: torch.Tensor, cache: object) -> torch.Tensor:
        output = self._module(ids, cache=cache, use_cache=True, logits_to_keep=1)
        chosen: torch.Tensor = output.logits[:, -1].argmax(-1, keepdim=True)
        chosen.tolist()  # a token is done when the host has it
        return chosen

    def _random(self, size: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(size, generator=self._generator).bfloat16()
