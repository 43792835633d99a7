"""Grammars through the whole engine on a model with random weights: every answer is valid, and ends.

Validity is judged by jsonschema and by Python's re.
"""

import json
import re
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
import torch
from llguidance import LLMatcher

from common.engine.policy import DecodeFirst
from common.engine.runner_torch import TorchRunner
from common.engine.scheduler import Scheduler, StepOutput
from common.engine.sequence import Sequence
from common.errors import GalleyError, InvalidRequest
from common.ids import AttemptKey, RequestId, SequenceId
from common.kv.block_pool import BlockPool
from common.messages.generation import SamplingParams
from tests.support.structured import SCHEMAS, compact
from tests.support.tiny_models import END_ID, make_tiny_model, make_tokenizer

TOKENIZER = make_tokenizer()
DRAWN = SamplingParams(max_tokens=600, seed=0, temperature=1.0)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("tiny"), seed=3)


@pytest.fixture(scope="module")
def runner(directory: Path) -> TorchRunner:
    torch.set_num_threads(1)
    return TorchRunner(directory, dtype="float32", device="cpu", num_blocks=400)


def make_scheduler(runner: TorchRunner, num_blocks: int = 400) -> Scheduler:
    return Scheduler(
        BlockPool(num_blocks, runner.layout.block_size),
        None,
        DecodeFirst(chunk_tokens=16),
        max_num_seqs=16,
        max_num_batched_tokens=64,
        max_model_len=runner.max_model_len,
        eos_token_ids=runner.eos_token_ids,
    )


def sequence(number: int, text: str, sampling: SamplingParams, output: tuple[int, ...] = ()) -> Sequence:
    prompt = TOKENIZER.encode(text)
    return Sequence(
        id=SequenceId(number),
        key=AttemptKey(RequestId(f"r{number}"), 1, 0),
        tokens=[*prompt, *output],
        num_prompt=len(prompt),
        sampling=sampling,
        arrival=float(number),
        deadline=1e9,
    )


def run(scheduler: Scheduler, runner: TorchRunner, *seqs: Sequence) -> dict[int, StepOutput]:
    """Step to the end; the last output of each sequence."""
    for seq in seqs:
        scheduler.add(seq)
    last: dict[int, StepOutput] = {}
    while (plan := scheduler.plan()) is not None:
        for output in scheduler.complete(plan, runner.execute(plan)):
            last[output.seq.id] = output
    return last


def text_of(seq: Sequence) -> str:
    ids = [token for token in seq.tokens[seq.num_prompt :] if token != END_ID]
    text: str = TOKENIZER.decode(ids)
    return text


@pytest.mark.parametrize("schema", SCHEMAS, ids=list(SCHEMAS))
def test_random_weights_follow_every_schema_to_its_end(runner: TorchRunner, schema: str) -> None:
    sampling = replace(DRAWN, grammar=compact(SCHEMAS[schema]))
    variants = [
        sampling,
        replace(sampling, temperature=0.0),
        replace(sampling, top_k=2, min_p=0.1),
        replace(sampling, top_p=0.3, repetition_penalty=1.3, seed=5),
        replace(sampling, ignore_eos=True, min_tokens=3),
    ]
    seqs = [sequence(number, "answer: ", one) for number, one in enumerate(variants)]
    last = run(make_scheduler(runner), runner, *seqs)
    for seq in seqs:
        jsonschema.validate(json.loads(text_of(seq)), SCHEMAS[schema])
        assert last[seq.id].finish == "stop"


def test_an_expression_may_end_where_it_accepts_and_must_where_it_is_complete(runner: TorchRunner) -> None:
    open_ended = replace(DRAWN, grammar=LLMatcher.grammar_from_regex("[ab]{3,}"), max_tokens=100)
    closed = replace(DRAWN, grammar=LLMatcher.grammar_from_regex("[ab]{3}"))
    seqs = [sequence(number, "x", replace(open_ended, seed=number)) for number in range(6)]
    seqs += [sequence(10 + number, "x", replace(closed, seed=number)) for number in range(6)]
    last = run(make_scheduler(runner), runner, *seqs)
    for seq in seqs[:6]:
        assert re.fullmatch("[ab]{3,}", text_of(seq))
        assert (last[seq.id].finish == "stop") == (seq.tokens[-1] == END_ID)
    for seq in seqs[6:]:
        assert re.fullmatch("[ab]{3}", text_of(seq))
        assert (last[seq.id].finish, seq.num_output) == ("stop", 3)


def test_mixed_batches_leave_free_rows_as_they_are(runner: TorchRunner) -> None:
    free = replace(DRAWN, max_tokens=20, ignore_eos=True)
    alone = sequence(1, "free text", free)
    run(make_scheduler(runner), runner, alone)
    beside = sequence(1, "free text", free)
    bound = [
        sequence(2 + number, "x", replace(DRAWN, grammar=compact(SCHEMAS["nested"]))) for number in range(4)
    ]
    run(make_scheduler(runner), runner, beside, *bound)
    assert beside.tokens == alone.tokens
    for seq in bound:
        jsonschema.validate(json.loads(text_of(seq)), SCHEMAS["nested"])


def test_any_worker_goes_on_from_prompt_and_output(runner: TorchRunner) -> None:
    """At every cut, as after a handoff or a migration: the same tokens and the same end."""
    sampling = replace(DRAWN, grammar=compact(SCHEMAS["anyOf"]))
    whole = sequence(1, "go: ", sampling)
    run(make_scheduler(runner), runner, whole)
    output = tuple(whole.tokens[whole.num_prompt :])
    for cut in range(1, len(output)):
        rest = sequence(100 + cut, "go: ", sampling, output[:cut])
        last = run(make_scheduler(runner), runner, rest)
        assert rest.tokens == whole.tokens
        assert last[rest.id].finish == "stop"


def test_preemption_changes_nothing(runner: TorchRunner) -> None:
    grammar = compact(SCHEMAS["array"])
    prompts = ["a" * 30, "b" * 31, "c" * 29]

    def make() -> list[Sequence]:
        return [sequence(n, text, replace(DRAWN, grammar=grammar, seed=n)) for n, text in enumerate(prompts)]

    roomy, tight = make(), make()
    run(make_scheduler(runner), runner, *roomy)
    scheduler = make_scheduler(runner, num_blocks=9)
    run(scheduler, runner, *tight)
    assert scheduler.num_preemptions > 0
    assert [seq.tokens for seq in tight] == [seq.tokens for seq in roomy]


def test_a_grammar_that_cannot_go_on_costs_one_sequence(runner: TorchRunner) -> None:
    scheduler = make_scheduler(runner)
    broken = sequence(1, "x", replace(DRAWN, grammar="{}"))
    strange = sequence(2, "x", replace(DRAWN, grammar=compact(SCHEMAS["const"])), output=(50, 51))
    fine = sequence(3, "x", replace(DRAWN, grammar=compact(SCHEMAS["const"])))
    for seq in (broken, strange, fine):
        scheduler.add(seq)
    failed: dict[SequenceId, GalleyError] = {}
    while (plan := scheduler.plan()) is not None:
        result = runner.execute(plan)
        failed |= result.failed
        scheduler.complete(plan, result)
    assert set(failed) == {1, 2}
    assert all(isinstance(error, InvalidRequest) for error in failed.values())
    assert json.loads(text_of(fine)) == SCHEMAS["const"]["const"]
    assert scheduler.is_empty


def test_what_has_left_the_scheduler_is_forgotten(directory: Path) -> None:
    runner = TorchRunner(directory, dtype="float32", device="cpu", num_blocks=400)
    scheduler = make_scheduler(runner)
    run(
        scheduler,
        runner,
        *(sequence(n, "x", replace(DRAWN, grammar=compact(SCHEMAS["enum"]))) for n in range(5)),
    )
    run(scheduler, runner, sequence(9, "x", replace(DRAWN, max_tokens=1)))
    assert runner._matchers.num_live == 0
