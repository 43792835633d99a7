"""The engine on a CUDA device, against transformers on the same device and against itself; random weights.

Also for torch 2.11, transformers 5.17 and Python 3.12. Where nothing can be downloaded, bring the wheels of
structlog, orjson, llguidance and pytest-asyncio.
    python -m pytest -m gpu tests/gpu
"""

import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig

from common.engine.attention import PagedStep
from common.engine.cuda_graphs import CudaRecorder, DecodeGraphs
from common.engine.runner import PlanRow
from common.engine.runner_torch import TorchRunner
from common.engine.sampler import sample
from common.ids import BlockId, SequenceId
from tests.support.tiny_models import KINDS, VOCAB, make_tiny_model
from tests.support.torch_driver import GREEDY, Driver

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

BLOCK: Final = 16
LENGTHS: Final = (1, 2, 15, 16, 17, 33, 100, 256, 600)
NUM_OUTPUT: Final = 8
TIE: Final = 1e-3
"""Logits this close are the same to float32 arithmetic done in another order, on a GPU."""


@dataclass
class Model:
    directory: Path
    reference: Any
    runner: TorchRunner


def prompt_of(length: int) -> list[int]:
    source = random.Random(length)
    return [source.randrange(3, VOCAB) for _ in range(length)]


def reference_of(directory: Path, kind: str, dtype: torch.dtype = torch.float32) -> Any:
    # Only eager attention implements soft-capping in transformers.
    attention = "eager" if kind == "gemma2" else "sdpa"
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation=attention)
    reference.generation_config.eos_token_id = None
    return reference.eval().to("cuda")


def runner_for(directory: Path, **others: Any) -> TorchRunner:
    settings: dict[str, Any] = {"dtype": "float32", "device": "cuda", "num_blocks": 256, "max_num_seqs": 33}
    runner = TorchRunner(directory, block_size=BLOCK, **(settings | others))
    runner.warm_up()
    return runner


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    assert not torch.backends.cuda.matmul.allow_tf32
    kind = request.param
    directory = make_tiny_model(kind, tmp_path_factory.mktemp(kind), seed=1)
    return Model(directory, reference_of(directory, kind), runner_for(directory))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With heads as large models have them, so that the kernel is met as they meet it."""
    directory = tmp_path_factory.mktemp("llama")
    return make_tiny_model("llama", directory, seed=2, head_dim=64, num_attention_heads=6)


def assert_right(reference: Any, prompt: list[int], output: list[int]) -> None:
    """`output` is what generate says, up to a tie between logits."""
    ids = torch.tensor([prompt], device="cuda")
    config = GenerationConfig(
        max_new_tokens=len(output),
        do_sample=False,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    found = reference.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    for token, expected, logits in zip(
        output, found.sequences[0, len(prompt) :].tolist(), found.logits, strict=True
    ):
        if token != expected:
            assert float(logits[0, expected] - logits[0, token]) < TIE
            return


@contextmanager
def no_waiting() -> Iterator[None]:
    """Whatever would wait for the device raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def decode_rows(count: int) -> list[PlanRow]:
    """Rows over a pool of 256 blocks, each at the end of a text of its own length."""
    rows, used = [], 0
    for number in range(count):
        length = 1 + 37 * number % 113
        blocks = tuple(BlockId(255 - used - i) for i in range(-(-length // BLOCK)))
        used += len(blocks)
        tokens = prompt_of(length)
        rows.append(PlanRow(SequenceId(number), tokens, length - 1, 1, length, blocks, True, 0, GREEDY))
    return rows


def eager_logits(runner: TorchRunner, rows: list[PlanRow], kernel: bool) -> Tensor:
    step = PagedStep(runner._pool, rows, runner._kernel if kernel else None)
    wanted = torch.tensor([step.order.index(i) for i in range(len(rows))], device="cuda")
    with torch.inference_mode():
        return runner._model.logits(step, wanted)


# --- equal to transformers -------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1 << 30, 33])
def test_prefill_and_replayed_decode_say_what_generate_says(model: Model, chunk: int) -> None:
    assert model.runner.mode == "cuda_graphs"
    assert model.runner._kernel is not None
    driver = Driver(model.runner, seed=chunk)
    texts = [driver.text(prompt_of(length)) for length in LENGTHS]
    for length, output in zip(LENGTHS, driver.run(texts, NUM_OUTPUT, chunk), strict=True):
        assert_right(model.reference, prompt_of(length), output)


def test_eager_steps_say_it_too_with_and_without_the_kernel(model: Model) -> None:
    runner = runner_for(model.directory, compile_model=False)
    assert runner.mode == "eager"
    for kernel in (runner._kernel, None):
        runner._kernel = kernel
        driver = Driver(runner)
        texts = [driver.text(prompt_of(length)) for length in LENGTHS]
        for length, output in zip(LENGTHS, driver.run(texts, NUM_OUTPUT, 100), strict=True):
            assert_right(model.reference, prompt_of(length), output)


@pytest.mark.parametrize("steps", ["scored prompt", "replayed decode"])
def test_bfloat16_is_as_good_as_that_of_transformers(llama: Path, steps: str) -> None:
    """Mean log probability of 600 tokens: ours and theirs in bfloat16, both beside float32."""
    runner = runner_for(llama, dtype="bfloat16")
    driver = Driver(runner)
    if steps == "scored prompt":
        text = driver.text(prompt_of(600), replace(GREEDY, prompt_logprobs=0))
        driver.run([text], 1, 128)
        ours, first = [score.logprob for score in text.scores], 1
    else:
        text = driver.text(prompt_of(40), replace(GREEDY, logprobs=0, temperature=1.0, seed=1))
        driver.run([text], 600)
        ours, first = [s.logprobs.logprob for s in text.sampled if s.logprobs], 40
    tokens = torch.tensor(text.tokens[: first + len(ours)], device="cuda")

    def mean_of(dtype: torch.dtype) -> float:
        with torch.inference_mode():
            logits = reference_of(llama, "llama", dtype)(tokens[None]).logits[0].float()
        found = logits.log_softmax(-1)[:-1].gather(-1, tokens[1:, None])
        return float(found[first - 1 :].mean())

    exact, theirs = mean_of(torch.float32), mean_of(torch.bfloat16)
    mean = sum(ours) / len(ours)
    assert abs(mean - exact) <= max(2 * abs(theirs - exact), 0.005 * abs(exact))


# --- equal to itself -------------------------------------------------------------------------------


def test_replays_equal_eager_steps_for_every_batch(llama: Path) -> None:
    runner = runner_for(llama)
    graphs = runner._graphs
    assert graphs is not None
    runner._pool.tensor.normal_()
    before = runner._pool.tensor.clone()
    for count in range(1, 34):
        rows = decode_rows(count)
        runner._pool.tensor.copy_(before)
        found = graphs.logits(rows).clone()
        written = runner._pool.tensor[:-1].clone()
        for kernel in (True, False):
            runner._pool.tensor.copy_(before)
            torch.testing.assert_close(eager_logits(runner, rows, kernel), found, rtol=1e-3, atol=1e-3)
            torch.testing.assert_close(runner._pool.tensor[:-1], written, rtol=1e-3, atol=1e-3)


def test_the_fallback_can_be_recorded_too(llama: Path) -> None:
    runner = runner_for(llama, compile_model=False)
    runner._pool.tensor.normal_()
    graphs = DecodeGraphs(
        runner._model,
        runner._pool,
        scratch=runner.buffer.num_blocks,
        max_rows=9,
        max_len=200,
        kernel=None,
        record=CudaRecorder(),
    )
    for count in (9, 1, 5, 8):
        rows = decode_rows(count)
        found = graphs.logits(rows).clone()
        torch.testing.assert_close(eager_logits(runner, rows, False), found, rtol=1e-3, atol=1e-3)


def test_nothing_waits_for_the_device_but_the_read_of_the_tokens(llama: Path) -> None:
    runner = runner_for(llama)
    graphs = runner._graphs
    assert graphs is not None
    rows = decode_rows(9)
    # A prompt, a chunk behind something known, and decodes.
    first, second = decode_rows(11)[9:]
    packed = [
        replace(first, start=0, count=len(first.tokens)),
        replace(second, start=BLOCK, count=len(second.tokens) - BLOCK),
        *rows,
    ]
    wanted = torch.arange(len(packed), device="cuda")
    for _ in range(2):  # the first time kernels come into being, which may wait
        with torch.inference_mode():
            waiting = runner._model.logits(PagedStep(runner._pool, packed, runner._kernel), wanted)
            graphs.logits(rows)
    with no_waiting(), torch.inference_mode():
        waiting = runner._model.logits(PagedStep(runner._pool, packed, runner._kernel), wanted)
        logits = graphs.logits(rows)
    assert waiting.isfinite().all()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as reads:
            warnings.simplefilter("always")
            sample(logits, rows, ())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len([one for one in reads if "synchroniz" in str(one.message)]) == 1


# --- the pool --------------------------------------------------------------------------------------


def test_a_block_shows_its_memory_to_cuda_libraries(llama: Path) -> None:
    runner = runner_for(llama)
    block: Any = runner.buffer.block(BlockId(3))
    interface = block.__cuda_array_interface__
    assert interface["shape"] == (runner.layout.block_bytes,)
    assert interface["typestr"] == "|u1"
    assert interface["strides"] is None
    address, read_only = interface["data"]
    assert address == runner._pool.tensor.data_ptr() + 3 * runner.layout.block_bytes
    assert not read_only
    block.fill_(7)
    assert bool((runner._pool.tensor[3].view(torch.uint8) == 7).all())
    assert not runner._pool.tensor[2].any()
    assert len(runner._pool.tensor) == runner.buffer.num_blocks + 1


def test_blocks_carry_a_sequence_to_another_runner(llama: Path) -> None:
    here, there = runner_for(llama), runner_for(llama, num_blocks=64)
    sender, receiver = Driver(here, seed=3), Driver(there, seed=4)
    whole = sender.run([sender.text(prompt_of(100))], NUM_OUTPUT)[0]
    text = sender.text(prompt_of(100))
    sender.run([text], 1)
    copy = receiver.text(text.tokens)
    copy.num_prompt, copy.computed = text.num_prompt, text.computed
    receiver._row(copy, 1)  # takes blocks
    for source, target in zip(text.blocks, copy.blocks, strict=True):
        there.buffer.block(target).copy_(here.buffer.block(source))  # type: ignore[attr-defined]
    assert receiver.run([copy], NUM_OUTPUT) == [whole]
