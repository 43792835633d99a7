"""Masks in the sampler: forbidden tokens are never drawn, whatever else a request wants of its logits."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.engine.matchers import TokenMasks
from common.engine.runner import PlanRow
from common.engine.sampler import sample
from common.ids import SequenceId
from common.messages.generation import SamplingParams

VOCAB = 100
EOS = 2
BASE = SamplingParams(max_tokens=10, seed=1)


def row(sampling: SamplingParams = BASE, output: tuple[int, ...] = ()) -> PlanRow:
    tokens = [1, 2, 3, *output]
    return PlanRow(SequenceId(1), tokens, len(tokens) - 1, 1, 3, (), True, 0, sampling)


def masks(*allowed: tuple[int, set[int]]) -> TokenMasks:
    bits = np.zeros((len(allowed), 4, 32), np.uint8)
    for line, (_, tokens) in zip(bits, allowed, strict=True):
        line.reshape(-1)[list(tokens)] = 1
    packed = np.packbits(bits, axis=-1, bitorder="little").reshape(len(allowed), 16).view(np.int32)
    return TokenMasks(tuple(index for index, _ in allowed), packed)


def logits_of(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


@settings(max_examples=200, deadline=None)
@given(
    allowed=st.sets(st.integers(0, VOCAB - 1), min_size=1),
    sampling=st.builds(
        SamplingParams,
        max_tokens=st.just(10),
        seed=st.integers(0, 1 << 40),
        temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
        top_k=st.sampled_from([0, 1, 5, 99]),
        top_p=st.sampled_from([1.0, 0.5, 0.01]),
        min_p=st.sampled_from([0.0, 0.3]),
        presence_penalty=st.sampled_from([0.0, 2.0]),
        repetition_penalty=st.sampled_from([1.0, 1.5]),
        logit_bias=st.sampled_from([(), ((7, 100.0), (8, -100.0))]),
        min_tokens=st.sampled_from([0, 5]),
        logprobs=st.sampled_from([None, 3]),
    ),
)
def test_only_allowed_tokens_are_drawn(allowed: set[int], sampling: SamplingParams) -> None:
    (sampled,) = sample(logits_of(1), [row(sampling, (7, 9))], (EOS,), masks((0, allowed)))
    assert sampled.token in allowed


def test_greedy_takes_the_best_of_those_allowed_and_other_rows_are_as_ever() -> None:
    logits = logits_of(3)
    before = logits.clone()
    greedy = [row(replace(BASE, temperature=0.0))] * 3
    tokens = [one.token for one in sample(logits, greedy, (EOS,), masks((1, {4, 50, 99})))]
    free = [one.token for one in sample(logits, greedy, (EOS,))]
    assert tokens == [free[0], max((4, 50, 99), key=lambda token: float(logits[1, token])), free[2]]
    assert torch.equal(logits, before)


def test_drawn_tokens_have_the_model_s_odds_among_those_allowed() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 10], logits[0, 11], logits[0, 12] = 1.0, 0.0, 9.0
    counts = Counter(
        sample(logits, [row(replace(BASE, seed=seed))], (), masks((0, {10, 11})))[0].token
        for seed in range(3000)
    )
    assert counts[10] / 3000 == pytest.approx(torch.tensor(1.0).sigmoid().item(), abs=0.03)


def test_a_complete_grammar_ends_before_min_tokens() -> None:
    early = replace(BASE, min_tokens=5, stop_token_ids=(60,))
    assert sample(logits_of(1), [row(early)], (EOS,), masks((0, {EOS})))[0].token == EOS
    for seed in range(20):
        drawn = row(replace(early, seed=seed))
        assert sample(logits_of(1), [drawn], (EOS,), masks((0, {EOS, 60, 5})))[0].token == 5


def test_log_probabilities_are_the_model_s_own() -> None:
    logits = logits_of(1)
    (sampled,) = sample(logits, [row(replace(BASE, logprobs=2))], (), masks((0, {5})))
    assert sampled.logprobs is not None
    assert sampled.logprobs.logprob == pytest.approx(float(logits[0].log_softmax(-1)[5]), abs=1e-5)
    assert len(sampled.logprobs.top) == 2
