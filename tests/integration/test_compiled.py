"""Really compiled models: right to bfloat16, the same bits in any company, and found again.

A tolerance is what transformers' own bfloat16 pass is away from float32 with the same weights, half as much
again for luck: both round to bfloat16, ours less often. On a CPU that cannot have our operators the same
holds of what runs instead, and only the mode is another.
"""

import os
import random
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import orjson
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from common.engine.runner_torch import EngineMode, TorchRunner
from common.errors import StepFailed
from tests.support import kernels
from tests.support.tiny_models import VOCAB, make_tiny_model
from tests.support.torch_driver import GREEDY, Driver, Text

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

MODELS: Final[dict[str, dict[str, Any]]] = {
    # Sliding windows, normalised queries and keys, a scale kept in a buffer.
    "gemma3": {"head_dim": 64},
    # Biases, one KV head a head, rotary frequencies few enough to become literals; no width a multiple of 32.
    "gpt_neox": {"hidden_size": 192, "intermediate_size": 200},
}
MODE: Final[EngineMode] = "compiled" if kernels.CAPABLE else "eager"
LENGTHS: Final = (1, 2, 15, 16, 17, 33, 64, 100)
LUCK: Final = 1.5
ALL_SCORES: Final = replace(GREEDY, logprobs=5, prompt_logprobs=2)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(1000 * seed + length).choices(range(3, VOCAB), k=length)


@dataclass
class Model:
    directory: Path
    cache: Path
    runner: TorchRunner
    float32: Any
    bfloat16: Any

    def another(self, **settings: Any) -> TorchRunner:
        return make_runner(self.directory, self.cache, **settings)

    def logits(self, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        """In float32, and how far transformers is from that in bfloat16."""
        ids = torch.tensor([tokens])
        with torch.inference_mode():
            exact, rounded = self.float32(ids).logits[0], self.bfloat16(ids).logits[0].float()
        return exact, rounded - exact


def make_runner(directory: Path, cache: Path, **settings: Any) -> TorchRunner:
    defaults: dict[str, Any] = {"dtype": "bfloat16", "num_blocks": 256, "threads": 1, "cache_dir": cache}
    return TorchRunner(directory, **(defaults | settings))


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    kernels.load()
    kind: str = request.param
    directory = make_tiny_model(kind, tmp_path_factory.mktemp(kind), seed=1, **MODELS[kind])
    cache = kernels.cache_with_kernels(tmp_path_factory.mktemp("cache"))
    runner = make_runner(directory, cache)
    assert runner.mode == "eager"
    assert runner.compile() == runner.mode == MODE
    bfloat16, float32 = (AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16) for _ in "ab")
    return Model(directory, cache, runner, float32.float().eval(), bfloat16.eval())


# --- right -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [200, 64, 1])
def test_log_probabilities_are_as_near_as_transformers_are(model: Model, chunk: int) -> None:
    prompt = prompt_of(150)
    driver = Driver(model.runner)
    text = driver.text(prompt, replace(GREEDY, prompt_logprobs=0))
    driver.run([text], 1, chunk)
    exact, error = model.logits(prompt)
    lines, tokens = exact.log_softmax(-1), torch.tensor(prompt[1:])[:, None]
    expected = lines[:-1].gather(1, tokens)[:, 0]
    allowed = (exact + error).log_softmax(-1)[:-1].gather(1, tokens)[:, 0] - expected
    wrong = torch.tensor([score.logprob for score in text.scores]) - expected
    assert len(text.scores) == len(prompt) - 1
    assert 0 < wrong.square().mean().sqrt() <= LUCK * allowed.square().mean().sqrt()
    assert wrong.abs().max() <= LUCK * allowed.abs().max()


def test_tokens_are_the_best_but_for_near_ties(model: Model) -> None:
    eager = model.another(compile_model=False)
    assert eager.mode == "eager"
    for runner in (model.runner, eager):
        runner._pool.tensor.fill_(float("nan"))  # never written slots do not matter
        driver = Driver(runner, seed=7)
        texts = [driver.text(prompt_of(length)) for length in LENGTHS]
        driver.run(texts[:3], 2)
        driver.run(texts, 8, chunk=20)  # prompts, chunks and decodes side by side
        runner._pool.tensor.zero_()
        for text in texts:
            exact, error = model.logits(text.tokens[:-1])
            line = exact[text.num_prompt - 1 :]
            chosen = line.gather(1, torch.tensor(text.output)[:, None])[:, 0]
            assert (line.amax(-1) - chosen <= 2 * LUCK * error.abs().max()).all()
        assert len({tuple(text.output) for text in texts}) > len(texts) // 2


def test_warm_up_leaves_the_pool_clean(model: Model) -> None:
    runner = model.another()
    assert runner.mode == MODE
    assert runner.warm_up() > 0
    assert not runner._pool.tensor.any()


def test_other_threads_go_on_during_a_step(model: Model) -> None:
    """The event loop is one of them: without its beats a worker counts as dead after 3 s."""
    driver = Driver(model.another(num_blocks=1024))
    shares = []
    for _ in range(5):  # a machine may keep a thread waiting, but not each time
        text = driver.text(prompt_of(2000))
        with ThreadPoolExecutor(1) as other:
            done = threading.Event()
            silence = other.submit(longest_silence, done)
            begin = time.perf_counter()
            try:
                driver.run([text], 1)
            finally:
                done.set()
            took = time.perf_counter() - begin
        shares.append(silence.result() / took)
    assert min(shares) < 0.5


def longest_silence(done: threading.Event) -> float:
    """How long this thread was kept from running at most, in s."""
    longest, last = 0.0, time.perf_counter()
    while not done.wait(0.0005):
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    return max(longest, time.perf_counter() - last)


def test_a_failing_step_says_so_and_the_next_does_not(model: Model) -> None:
    driver = Driver(model.another())
    with pytest.raises(StepFailed):
        driver.run([driver.text([VOCAB + 5, 3])], 1)
    text = driver.text(prompt_of(20))
    driver.run([text], 1)
    driver.runner._pool.tensor[text.blocks[0]] = float("nan")
    with pytest.raises(StepFailed, match="not numbers"):
        driver.run([text], 2)
    assert len(driver.run([driver.text(prompt_of(20))], 2)[0]) == 2


# --- the same bits ---------------------------------------------------------------------------------


def scores_of(text: Text) -> tuple[object, ...]:
    """All log probabilities, which are equal only if all of their digits are."""
    return text.tokens, text.sampled, text.scores


def test_fifty_requests_get_the_same_bits_alone_and_among_others(model: Model) -> None:
    runner = model.another(deterministic=True)
    assert runner.mode == MODE
    prompts = [prompt_of(1 + 3 * number % 70, number) for number in range(50)]
    alone = []
    for prompt in prompts:
        driver = Driver(runner)
        alone.append(driver.text(prompt, ALL_SCORES))
        driver.run(alone[-1:], 6)
    for first in range(0, 50, 16):
        driver = Driver(runner, seed=first)
        together = [driver.text(prompt, ALL_SCORES) for prompt in prompts[first : first + 16]]
        driver.run(together, 6, chunk=13)
        for one, other in zip(alone[first : first + 16], together, strict=True):
            assert scores_of(one) == scores_of(other)


def test_a_recomputed_text_goes_on_with_the_same_bits(model: Model) -> None:
    """As after a preemption, or elsewhere: prompt and output so far, at once."""
    driver = Driver(model.another(deterministic=True))
    whole = driver.text(prompt_of(40), ALL_SCORES)
    driver.run([whole], 24)
    for done in (1, 8, 23):
        resumed = driver.text(whole.tokens[: 40 + done], ALL_SCORES)
        resumed.num_prompt = 40
        other = driver.text(prompt_of(30), ALL_SCORES)
        driver.run([other, resumed], 24)
        assert resumed.sampled == whole.sampled[done:]
        assert resumed.scores == whole.scores


# --- the cache and the child -----------------------------------------------------------------------


def test_what_is_compiled_is_found_again(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")  # what a child would be
    assert model.another().mode == MODE
    other = model.another(block_size=8)
    assert other.mode == other.compile() == "eager"
    left = {path.suffix for path in (model.cache / "graphs").glob("*")}
    assert left == ({".pt2", ".digest", ".lock", ".failed"} if kernels.CAPABLE else set())


PARENT = """
import subprocess, sys
from pathlib import Path
import orjson
from common.engine.graph_compiler import GraphCompiler
from common.kv.layout import KVLayout

class Announced(subprocess.Popen):
    def __init__(self, *arguments, **settings):
        super().__init__(*arguments, **settings)
        print(self.pid, flush=True)

subprocess.Popen = Announced
directory, layout, cache = sys.argv[1:]
GraphCompiler(Path(directory), None, KVLayout(**orjson.loads(layout)), Path(cache)).run()
"""


def test_the_child_does_not_outlive_its_parent(tmp_path: Path) -> None:
    directory = make_tiny_model("llama", tmp_path / "llama", head_dim=32)
    cache = kernels.cache_with_kernels(tmp_path)
    layout = orjson.dumps(make_runner(directory, cache).layout).decode()
    command = [sys.executable, "-c", PARENT, str(directory), layout, str(cache)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = os.pidfd_open(int(parent.stdout.readline()))
        try:
            parent.send_signal(signal.SIGKILL)
            assert select.select([child], [], [], 120)[0], "the child goes on"
        finally:
            os.close(child)
    assert not list((cache / "graphs").glob("*.pt2")), "the child went on to its end"
