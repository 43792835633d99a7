"""The torch runner against transformers' own generate, in float32, token for token."""

import errno
import mmap
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from common.engine import attention
from common.engine.runner import BatchPlan
from common.engine.runner_torch import TorchRunner
from common.errors import ConfigError, StepFailed
from common.kv.layout import KVLayout
from common.messages.generation import SamplingParams
from tests.support.tiny_models import CONTEXT, KINDS, VOCAB, make_tiny_model
from tests.support.torch_driver import GREEDY, Driver

LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 48, 100, 255, 256, 600)
NUM_OUTPUT = 6
BLOCK = 16


def prompt_of(length: int) -> list[int]:
    source = random.Random(length)
    return [source.randrange(3, VOCAB) for _ in range(length)]


@dataclass
class Model:
    directory: Path
    reference: Any
    runner: TorchRunner
    expected: dict[int, list[int]]


def load_reference(directory: Path, kind: str) -> Any:
    # Only eager attention implements soft-capping in transformers.
    attention = "eager" if kind == "gemma2" else "sdpa"
    reference = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation=attention
    )
    reference.generation_config.eos_token_id = None
    return reference.eval()


def generate(reference: Any, prompt: list[int], count: int) -> list[int]:
    config = GenerationConfig(max_new_tokens=count, do_sample=False, pad_token_id=0)
    ids = torch.tensor([prompt])
    output = reference.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    return [int(token) for token in output[0, len(prompt) :]]


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    torch.set_num_threads(1)
    directory = make_tiny_model(request.param, tmp_path_factory.mktemp(request.param), seed=1)
    reference = load_reference(directory, request.param)
    runner = TorchRunner(directory, dtype="float32", block_size=BLOCK, num_blocks=256, threads=1)
    expected = {n: generate(reference, prompt_of(n), NUM_OUTPUT) for n in LENGTHS}
    return Model(directory, reference, runner, expected)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("llama"), seed=2)


def runner_for(directory: Path, **settings: Any) -> TorchRunner:
    defaults: dict[str, Any] = {"dtype": "float32", "num_blocks": 64, "threads": 1}
    return TorchRunner(directory, **(defaults | settings))


# --- equal tokens ----------------------------------------------------------------------------------


def test_expected_tokens_are_worth_comparing(model: Model) -> None:
    assert len({tuple(tokens) for tokens in model.expected.values()}) > len(LENGTHS) // 2


def test_one_at_a_time(model: Model) -> None:
    for length in LENGTHS:
        driver = Driver(model.runner)
        assert driver.run([driver.text(prompt_of(length))], NUM_OUTPUT) == [model.expected[length]]


def test_all_lengths_in_one_batch(model: Model) -> None:
    driver = Driver(model.runner)
    texts = [driver.text(prompt_of(length)) for length in LENGTHS]
    assert driver.run(texts, NUM_OUTPUT) == list(model.expected.values())


@pytest.mark.parametrize("chunk", [1, 7, 16, 33, 250])
def test_chunks_next_to_decodes(model: Model, chunk: int) -> None:
    lengths = [n for n in LENGTHS if n <= 40 * chunk]
    driver = Driver(model.runner, seed=chunk)
    texts = [driver.text(prompt_of(length)) for length in lengths]
    assert driver.run(texts, NUM_OUTPUT, chunk) == [model.expected[n] for n in lengths]


def test_the_gpus_attention_is_as_right(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_prefers_fused", lambda _query, kind: kind.softcap is None)
    driver = Driver(model.runner, seed=5)
    texts = [driver.text(prompt_of(length)) for length in LENGTHS]
    assert driver.run(texts, NUM_OUTPUT, 250) == list(model.expected.values())


def test_never_written_slots_do_not_matter(model: Model) -> None:
    model.runner._pool.tensor.fill_(float("nan"))
    driver = Driver(model.runner)
    texts = [driver.text(prompt_of(length)) for length in LENGTHS]
    assert driver.run(texts, NUM_OUTPUT, 250) == list(model.expected.values())
    model.runner._pool.tensor.zero_()


def test_blocks_of_others_are_not_touched(model: Model) -> None:
    driver = Driver(model.runner)
    bystander, other = driver.text(prompt_of(33)), driver.text(prompt_of(100))
    driver.step([(bystander, 33)])
    before = [bytes(model.runner.buffer.block(b)) for b in bystander.blocks]  # type: ignore[call-overload]
    driver.run([other], NUM_OUTPUT)
    assert before == [bytes(model.runner.buffer.block(b)) for b in bystander.blocks]  # type: ignore[call-overload]
    assert driver.run([bystander], NUM_OUTPUT) == [model.expected[33]]


def test_every_length_to_600(llama: Path) -> None:
    """One reference pass gives the greedy token after every prefix; the runner meets each as a prompt."""
    reference = load_reference(llama, "llama")
    prompt = prompt_of(600)
    with torch.inference_mode():
        table = reference(torch.tensor([prompt])).logits[0].log_softmax(-1)
    runner = runner_for(llama, num_blocks=800)
    params = replace(GREEDY, logprobs=0)
    for first in range(1, 601, 20):
        driver = Driver(runner)
        texts = [driver.text(prompt[:length], params) for length in range(first, first + 20)]
        driver.run(texts, 1)
        for text in texts:
            line = table[text.num_prompt - 1]
            assert text.output == [int(line.argmax())]
            logprobs = text.sampled[0].logprobs
            assert logprobs is not None
            assert logprobs.logprob == pytest.approx(float(line.max()), abs=1e-4)


# --- KV moves --------------------------------------------------------------------------------------


def test_blocks_carry_a_sequence_to_another_runner(model: Model) -> None:
    """What a transfer does: raw blocks from one pool to another, under other numbers, and on it goes."""
    there = TorchRunner(model.directory, dtype="float32", block_size=BLOCK, num_blocks=64, threads=1)
    assert there.layout == model.runner.layout
    assert there.weights_fingerprint == model.runner.weights_fingerprint
    sender, receiver = Driver(model.runner, seed=3), Driver(there, seed=4)
    text = sender.text(prompt_of(100))
    sender.run([text], 1)
    copy = receiver.text(text.tokens)
    copy.num_prompt = text.num_prompt
    copy.blocks = [receiver._free.pop() for _ in text.blocks]
    for source, target in zip(text.blocks, copy.blocks, strict=True):
        data = memoryview(there.buffer.block(target))  # type: ignore[arg-type]
        data[:] = memoryview(model.runner.buffer.block(source))  # type: ignore[arg-type]
    copy.computed = text.computed
    assert receiver.run([copy], NUM_OUTPUT) == [model.expected[100]]


def test_block_is_one_run_of_the_layouts_size(llama: Path) -> None:
    runner = runner_for(llama)
    assert runner.layout == KVLayout(kv_heads=3, num_layers=3, block_size=16, head_dim=16, dtype="float32")
    for block in (0, 63):
        view = memoryview(runner.buffer.block(block))  # type: ignore[arg-type]
        assert view.nbytes == runner.layout.block_bytes == runner.buffer.block_bytes
        assert view.contiguous
        assert not view.readonly


# --- sampling, limits, failures --------------------------------------------------------------------


def test_seeded_tokens_do_not_depend_on_the_batch(llama: Path) -> None:
    params = [SamplingParams(max_tokens=20, seed=seed) for seed in range(8)]
    alone, together = Driver(runner_for(llama)), Driver(runner_for(llama), seed=1)
    singly = [alone.run([alone.text(prompt_of(20), p)], 20)[0] for p in params]
    assert together.run([together.text(prompt_of(20), p) for p in params], 20, chunk=6) == singly
    assert len({tuple(tokens) for tokens in singly}) == len(params)


def test_a_resumed_text_samples_on(llama: Path) -> None:
    """Prompt + output so far, recomputed elsewhere, goes on with the tokens it would have had."""
    params = SamplingParams(max_tokens=20, seed=5, frequency_penalty=0.5, repetition_penalty=1.2)
    driver = Driver(runner_for(llama))
    whole = driver.run([driver.text(prompt_of(20), params)], 20)[0]
    resumed = driver.text(prompt_of(20) + whole[:9], params)
    resumed.num_prompt = 20
    assert driver.run([resumed], 20) == [whole]


def test_what_the_model_says_of_itself(llama: Path) -> None:
    runner = runner_for(llama, dtype="auto")
    assert runner.max_model_len == CONTEXT
    assert runner.vocab_size == VOCAB
    assert runner.eos_token_ids == (2,)
    assert runner.layout.dtype == "float32"
    assert runner_for(llama, max_model_len=100).max_model_len == 100
    assert runner.weights_fingerprint != runner_for(llama, dtype="bfloat16").weights_fingerprint


def test_context_beyond_the_model_is_refused(llama: Path) -> None:
    with pytest.raises(ConfigError, match="max_model_len"):
        runner_for(llama, max_model_len=CONTEXT + 1)


def test_warm_up_leaves_the_pool_clean(llama: Path) -> None:
    runner = runner_for(llama)
    assert runner.warm_up() > 0
    assert not runner._pool.tensor.any()
    runner_for(llama, num_blocks=2).warm_up()
    runner_for(llama, num_blocks=1, block_size=1).warm_up()


class NoHugePages(mmap.mmap):
    """As on a kernel that was built without them."""

    def madvise(self, *_arguments: int) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")


def test_a_system_without_huge_pages_serves_too(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "mmap", NoHugePages)
    assert runner_for(llama).warm_up() > 0


def test_a_pool_larger_than_memory_is_refused(llama: Path) -> None:
    for num_blocks in (1 << 40, 1 << 60):
        with pytest.raises(ConfigError, match="num_blocks"):
            runner_for(llama, num_blocks=num_blocks)


def test_default_pool_is_what_all_sequences_could_use(llama: Path) -> None:
    runner = runner_for(llama, num_blocks=None, max_num_seqs=3)
    assert runner.buffer.num_blocks == 3 * CONTEXT // 16


def test_logits_that_are_not_numbers_fail_the_step(llama: Path) -> None:
    runner = runner_for(llama)
    driver = Driver(runner)
    text = driver.text(prompt_of(20))
    driver.run([text], 1)
    runner._pool.tensor[text.blocks[0]] = float("nan")
    with pytest.raises(StepFailed, match="not numbers"):
        driver.run([text], 2)
    driver.free(text)
    assert len(driver.run([driver.text(prompt_of(20))], 2)[0]) == 2


def test_a_failing_step_says_so(llama: Path) -> None:
    driver = Driver(runner_for(llama))
    row = driver._row(driver.text([VOCAB + 5]), 1)
    with pytest.raises(StepFailed, match="step 7"):
        driver.runner.execute(BatchPlan(7, (row,)))
