"""The fake model: its tokens are foretold without a pool, and any wrong byte of KV changes them."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.engine.runner import BatchPlan, ModelRunner, PlanRow
from common.engine.runner_fake import FakeModel, FakeRunner
from common.errors import StepFailed
from common.ids import BlockId, SequenceId
from common.kv.layout import KVLayout
from common.messages.generation import SamplingParams

MODEL = FakeModel(vocab_size=1 << 40)
SIZE = MODEL.layout.block_size
SAMPLING = SamplingParams(max_tokens=5, seed=3)


def row(tokens: list[int], start: int, blocks: list[int], sampling: SamplingParams = SAMPLING) -> PlanRow:
    return PlanRow(
        seq=SequenceId(1),
        tokens=tokens,
        start=start,
        count=len(tokens) - start,
        num_prompt=len(tokens),
        blocks=tuple(BlockId(block) for block in blocks),
        sample=True,
        choice=0,
        sampling=sampling,
    )


def sample(runner: ModelRunner, one: PlanRow) -> int:
    return runner.execute(BatchPlan(1, (one,))).tokens[one.seq].token


def test_kv_covers_every_byte_of_a_block() -> None:
    runner = FakeRunner(FakeModel(KVLayout(2, 3, 4, 5, "bfloat16")), 2)
    assert runner.model.slot_bytes * 4 == runner.buffer.block_bytes == len(runner.buffer.block(BlockId(0)))
    sample(runner, row([1, 2, 3, 4], 0, [1]))
    slots = {bytes(runner.buffer.block(BlockId(1))[i * 120 : (i + 1) * 120]) for i in range(4)}
    assert len(slots) == 4
    assert bytes(120) not in slots
    assert not any(runner.buffer.block(BlockId(0)))


@given(position=st.integers(0, 19), byte=st.integers(0, MODEL.slot_bytes - 1), flip=st.integers(1, 255))
def test_one_wrong_byte_changes_the_next_token(position: int, byte: int, flip: int) -> None:
    runner = FakeRunner(MODEL, 2)
    prompt = list(range(20))
    first = sample(runner, row(prompt, 0, [1, 0]))
    assert [first] == MODEL.expected_tokens(prompt, SAMPLING)[:1]
    block, slot = divmod(position, SIZE)
    runner.buffer.block(BlockId(1 - block))[slot * MODEL.slot_bytes + byte] ^= flip
    second = sample(runner, row([*prompt, first], 20, [1, 0]))
    assert second != MODEL.expected_tokens(prompt, SAMPLING)[1]


def test_swapped_blocks_another_prefix_and_other_weights_show() -> None:
    runner = FakeRunner(MODEL, 3)
    prompt = [1] * (2 * SIZE)
    sample(runner, row(prompt, 0, [0, 1]))
    tokens = {
        sample(runner, row([*prompt, 5], 2 * SIZE, table)) for table in ([0, 1, 2], [1, 0, 2], [0, 0, 2])
    }
    assert len(tokens) == 3
    other = replace(MODEL, weights="other")
    assert other.expected_tokens(prompt, SAMPLING) != MODEL.expected_tokens(prompt, SAMPLING)
    assert FakeRunner(other, 1).weights_fingerprint != runner.weights_fingerprint


def test_seed_and_choice_matter_only_above_temperature_0() -> None:
    def outputs(temperature: float) -> set[tuple[int, ...]]:
        params = [SamplingParams(max_tokens=4, seed=seed, temperature=temperature) for seed in (1, 2)]
        return {tuple(MODEL.expected_tokens([1, 2], p, choice)) for p in params for choice in (0, 1)}

    assert len(outputs(1.0)) == 4
    assert len(outputs(0.0)) == 1


def test_the_reference_ends_like_a_request() -> None:
    model = FakeModel(vocab_size=4, eos_token_ids=(0,), max_model_len=50)
    params = SamplingParams(max_tokens=100, seed=1)
    output = model.expected_tokens([1], params)
    assert output.index(0) == len(output) - 1
    assert len(model.expected_tokens([1], replace(params, ignore_eos=True))) == 49
    assert len(model.expected_tokens([1], replace(params, ignore_eos=True, max_tokens=7))) == 7
    late = model.expected_tokens([1], replace(params, min_tokens=20))
    assert 0 not in late[:20]
    assert late[-1] == 0
    stopped = model.expected_tokens([1], replace(params, stop_token_ids=(1, 2, 3), ignore_eos=True))
    assert stopped[-1] != 0
    assert not set(stopped[:-1]) & {1, 2, 3}


def test_logprobs_come_as_asked() -> None:
    runner = FakeRunner(MODEL, 1)
    for asked, count in ((None, None), (0, 0), (3, 3)):
        one = row([1, 2], 0, [0], replace(SAMPLING, logprobs=asked))
        sampled = runner.execute(BatchPlan(1, (one,))).tokens[one.seq]
        assert (None if sampled.logprobs is None else len(sampled.logprobs.top)) == count
    assert sampled.logprobs is not None
    assert sampled.logprobs.top[0] == (sampled.token, sampled.logprobs.logprob)


def test_rows_without_room_and_chosen_plans_fail() -> None:
    with pytest.raises(StepFailed, match="no room"):
        sample(FakeRunner(MODEL, 2), row([1] * 17, 0, [0]))
    with pytest.raises(StepFailed, match="no room"):
        sample(FakeRunner(replace(MODEL, max_model_len=8), 2), row([1] * 9, 0, [0]))
    with pytest.raises(StepFailed, match="was to fail"):
        sample(FakeRunner(MODEL, 2, fail_when=lambda plan: plan.step == 1), row([1], 0, [0]))
