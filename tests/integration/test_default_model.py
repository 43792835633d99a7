"""The default model itself: converted, loaded, and equal to transformers.generate in float32."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from common.engine.prepare_model import prepare
from common.engine.runner_torch import TorchRunner
from common.kv.layout import KVLayout
from common.model_files import DEFAULT_CACHE_DIR, DEFAULT_MODEL
from tests.support.torch_driver import Driver

NUM_OUTPUT = 8
LENGTHS = (1, 15, 16, 17, 100, 255, 600)


@pytest.fixture(scope="module")
def directory() -> Path:
    return prepare(DEFAULT_MODEL, DEFAULT_CACHE_DIR, lambda _line: None)


@pytest.fixture(scope="module")
def text(directory: Path) -> list[int]:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    sentence = "A galley is the kitchen of a ship, where cooks of several nations argue about pepper. "
    ids: list[int] = tokenizer(sentence * 40)["input_ids"]
    return ids


def generate(reference: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    config = GenerationConfig(max_new_tokens=NUM_OUTPUT, do_sample=False, pad_token_id=0)
    output = reference.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    return [int(token) for token in output[0, len(prompt) :]]


def test_tokens_equal_those_of_generate(directory: Path, text: list[int]) -> None:
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    reference.generation_config.eos_token_id = None
    expected = [generate(reference, text[:length]) for length in LENGTHS]
    runner = TorchRunner(directory, dtype="float32", num_blocks=200)
    assert runner.layout == KVLayout(3, 30, 16, 64, "float32")
    for chunk in (1 << 30, 100):
        driver = Driver(runner, seed=chunk)
        texts = [driver.text(text[:length]) for length in LENGTHS]
        assert driver.run(texts, NUM_OUTPUT, chunk) == expected


@pytest.mark.parametrize("compiled", [False, True])
def test_bfloat16_answers_a_question(directory: Path, compiled: bool) -> None:
    """In float32 "L" is only 0.1 behind "The" as the first token, less than bfloat16 logits resolve."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
    runner = TorchRunner(directory, num_blocks=64, compile_model=compiled)
    if compiled:
        runner.compile()
    runner.warm_up()
    assert runner.layout.dtype == "bfloat16"
    driver = Driver(runner)
    output = driver.run([driver.text(prompt)], 8)[0]
    assert tokenizer.decode(output) == "The capital of France is Paris.<|im_end|>"
    assert output[-1] in runner.eos_token_ids
