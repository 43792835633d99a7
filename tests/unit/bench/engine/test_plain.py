"""That transformers, when it is measured, does the work that is said to be measured."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaForCausalLM

from bench.engine.plain import PlainTransformers
from tests.support.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("llama"))


def test_a_step_attends_to_its_context(directory: Path) -> None:
    """Against a pass over the same cache: the token, and the cache grown by one of each row."""
    plain = PlainTransformers(directory)
    plain.fill(3, 20)
    first, cache = plain._next, DynamicCache()
    for layer, (key, value, *_) in enumerate(plain._cache):
        cache.update(key.clone(), value.clone(), layer)
    module = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval()
    with torch.inference_mode():
        expected = module(first, cache=cache).logits[:, -1].argmax(-1, keepdim=True)
    plain.step()
    assert torch.equal(plain._next, expected)
    assert plain._cache.get_seq_length() == cache.get_seq_length() == 20
    plain.step()
    plain.rewind()
    assert plain._cache.get_seq_length() == 19


def test_a_model_that_ignores_its_cache_is_told(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = LlamaForCausalLM.forward

    def forgetful(self: Any, ids: torch.Tensor, cache: object, **others: Any) -> object:
        return forward(self, ids, cache=DynamicCache(), **others)

    plain = PlainTransformers(directory)
    plain.fill(1, 5)
    monkeypatch.setattr(LlamaForCausalLM, "forward", forgetful)
    with pytest.raises(RuntimeError, match="did not add"):
        plain.step()
