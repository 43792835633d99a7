"""Log probabilities of prompts, against log_softmax of transformers' own logits in float32."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from common.engine import runner_torch
from common.engine.runner import PlanRow
from common.engine.runner_fake import FakeModel, FakeRunner
from common.engine.runner_torch import TorchRunner
from common.engine.scoring import pieces
from common.ids import SequenceId
from common.messages.generation import SamplingParams
from common.messages.stream import TokenLogprobs
from tests.support.sequences import make_scheduler, make_sequence
from tests.support.tiny_models import VOCAB, make_tiny_model
from tests.support.torch_driver import GREEDY, Driver, Text

LENGTHS = (1, 2, 15, 33, 100, 300)
TOP = 3
SCORED = replace(GREEDY, prompt_logprobs=TOP)


def prompt_of(length: int) -> list[int]:
    return [3 + (length * 31 + i * i * 7 + i) % 250 for i in range(length)]


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_tiny_model(request.param, tmp_path_factory.mktemp(request.param), seed=2)


@pytest.fixture(scope="module")
def reference(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@pytest.fixture(scope="module")
def runner(directory: Path) -> TorchRunner:
    return TorchRunner(directory, dtype="float32", device="cpu", num_blocks=200)


def check(found: list[TokenLogprobs], prompt: list[int], reference: Any, top: int = TOP) -> None:
    with torch.inference_mode():
        table = reference(torch.tensor([prompt])).logits[0].log_softmax(-1)
    assert len(found) == len(prompt) - 1
    for position, one in enumerate(found, start=1):
        line = table[position - 1]
        assert one.logprob == pytest.approx(float(line[prompt[position]]), abs=1e-3)
        assert len(one.top) == top
        best = line.topk(top)
        assert [value for _, value in one.top] == pytest.approx(best.values.tolist(), abs=1e-3)
        for token, value in one.top:
            assert value == pytest.approx(float(line[token]), abs=1e-3)


@pytest.mark.parametrize("chunk", [1 << 30, 40])
@pytest.mark.parametrize("at_once", [1 << 30, 64])
def test_they_are_transformers_own(
    runner: TorchRunner, reference: Any, chunk: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the scheduler cuts the prompts, and the runner its logits; beside rows that want none."""
    monkeypatch.setattr(runner_torch, "_SCORED_LOGITS", at_once * VOCAB)
    driver = Driver(runner)
    texts = [driver.text(prompt_of(length), SCORED) for length in LENGTHS]
    plain = driver.text(prompt_of(50))
    outputs = driver.run([*texts, plain], 4, chunk)
    for text in texts:
        check(text.scores, text.tokens[: text.num_prompt], reference)
    assert not plain.scores
    alone = Driver(runner)
    free: list[Text] = [alone.text(prompt_of(length)) for length in (*LENGTHS, 50)]
    assert alone.run(free, 4) == outputs


def test_each_row_gets_as_many_alternatives_as_it_wants(runner: TorchRunner, reference: Any) -> None:
    driver = Driver(runner)
    texts = [driver.text(prompt_of(20), replace(GREEDY, prompt_logprobs=count)) for count in (0, 5)]
    driver.run(texts, 1)
    check(texts[0].scores, prompt_of(20), reference, 0)
    check(texts[1].scores, prompt_of(20), reference, 5)


def make_row(number: int, start: int, count: int, num_prompt: int, scored: bool) -> PlanRow:
    sampling = SamplingParams(1, 0, prompt_logprobs=2 if scored else None)
    return PlanRow(SequenceId(number), range(start + count), start, count, num_prompt, (), True, 0, sampling)


@given(
    shares=st.lists(st.tuples(st.integers(0, 50), st.integers(1, 60), st.integers(1, 80), st.booleans())),
    limit=st.integers(1, 40),
)
def test_pieces_add_up_and_are_small(shares: list[tuple[int, int, int, bool]], limit: int) -> None:
    rows = [make_row(number, *share) for number, share in enumerate(shares)]
    seen: dict[int, list[PlanRow]] = {}
    for step in pieces(rows, limit):
        assert len({row.seq for row in step}) == len(step)
        assert sum(row.count for row in step if row.scored) <= limit
        for row in step:
            seen.setdefault(row.seq, []).append(row)
    for row in rows:
        parts = seen[row.seq]
        assert [one.start for one in parts] == [row.start, *(one.start + one.count for one in parts[:-1])]
        assert sum(one.count for one in parts) == row.count
        assert [one.sample for one in parts] == [False] * (len(parts) - 1) + [True]
        assert [p for one in parts for p in one.scored] == list(row.scored)


def test_the_prefix_cache_is_passed_by() -> None:
    model = FakeModel()
    scheduler = make_scheduler(model, 32, cached=True)
    runner = FakeRunner(model, 32)
    prompt = list(range(1, 50))

    def scored(number: int, count: int | None) -> tuple[int, list[TokenLogprobs]]:
        seq = make_sequence(number, prompt, SamplingParams(2, 0, prompt_logprobs=count))
        scheduler.add(seq)
        found: list[TokenLogprobs] = []
        while (plan := scheduler.plan()) is not None:
            result = runner.execute(plan)
            found += result.scored.get(seq.id, ())
            scheduler.complete(plan, result)
        return seq.num_cached, found

    expected = list(model.score(prompt, range(1, 49), 1))
    assert scored(0, None) == (0, [])
    assert scored(1, None) == (48, [])
    assert scored(2, 1) == (0, expected)
