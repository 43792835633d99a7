"""Answers from KV that was encoded and decoded, driven over the fake model, and what is said of them."""

from collections.abc import Sequence

import numpy as np
import pytest

from bench.benches.compression import compared, speed
from bench.engine.answers import Answer, Answers
from common.engine.runner_fake import FakeModel, FakeRunner
from common.ids import BlockId
from tests.support.kv_codecs import MirrorCodec

MODEL = FakeModel(vocab_size=50)
PROMPTS: Sequence[Sequence[int]] = [list(range(5)), list(range(16)), list(range(33))]


def answer(tokens: tuple[int, ...], *logprobs: float) -> Answer:
    return Answer(tokens, np.array(logprobs, np.float32))


def test_identical_answers_and_the_mean_error_are_counted() -> None:
    plain = [answer((1, 2), -1.0, -2.0), answer((3, 4), -1.0, -1.0)]
    found = [answer((1, 2), -1.5, -2.0), answer((3, 5), -1.0, -2.0)]
    assert compared(plain, found) == {
        "identical_answers": 0.5,
        "identical_second_tokens": 1.0,
        "logit_error_mean": pytest.approx((0.25 + 0.5) / 2),
    }


async def test_a_codec_without_loss_changes_no_answer_and_lost_kv_all() -> None:
    runner = FakeRunner(MODEL, 20)
    answers = Answers(runner, PROMPTS, 6)
    codec = MirrorCodec(runner.buffer)
    travelled = await answers.encoded(codec)
    assert len(travelled) == 1 + 1 + 3
    plain = answers.decode()
    assert [len(one.tokens) for one in plain] == [6, 6, 6]
    await answers.received(codec, travelled)
    assert [one.tokens for one in answers.decode()] == [one.tokens for one in plain]
    for block in travelled:
        runner.buffer.block(BlockId(block))[:] = bytes(runner.buffer.block_bytes)
    lost = answers.decode()
    assert all(one.tokens != other.tokens for one, other in zip(lost, plain, strict=True))


async def test_speed_counts_plain_bytes() -> None:
    runner = FakeRunner(MODEL, 4)
    figures = await speed(runner, MirrorCodec(runner.buffer))
    assert figures["bytes_saved"] == pytest.approx(-4 / runner.buffer.block_bytes)
    assert figures["encode_gb_s"] > 0
