"""The sampler against plain references: probabilities, cuts, penalties, log probabilities, determinism."""

import math
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from common.engine.runner import PlanRow
from common.engine.sampler import _adjust, _splitmix64, gumbel_noise, noise_key, restrict, sample
from common.errors import StepFailed
from common.ids import SequenceId
from common.messages.generation import SamplingParams

CPU = torch.device("cpu")
BASE = SamplingParams(max_tokens=10, seed=1)
GREEDY = replace(BASE, temperature=0.0)


def row(
    sampling: SamplingParams = BASE,
    prompt: tuple[int, ...] = (1, 2, 3),
    output: tuple[int, ...] = (),
    choice: int = 0,
) -> PlanRow:
    tokens = [*prompt, *output]
    return PlanRow(
        seq=SequenceId(1),
        tokens=[*tokens, 0, 0],  # a tail that is not to be looked at
        start=len(tokens) - 1,
        count=1,
        num_prompt=len(prompt),
        blocks=(),
        sample=True,
        choice=choice,
        sampling=sampling,
    )


def random_logits(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3


def one(logits: Tensor, row: PlanRow, eos: tuple[int, ...] = ()) -> int:
    return sample(logits[None], [row], eos)[0].token


# --- greedy ----------------------------------------------------------------------------------------


def test_greedy_takes_the_best() -> None:
    logits = random_logits(5, 1000)
    tokens = [s.token for s in sample(logits, [row(GREEDY)] * 5, ())]
    assert tokens == [max(range(1000), key=lambda i: line[i]) for line in logits.tolist()]


def test_greedy_ties_go_to_the_lowest_id() -> None:
    logits = torch.zeros(500)
    logits[[17, 90, 400]] = 1.0
    assert one(logits, row(GREEDY)) == 17
    assert one(torch.zeros(500), row(GREEDY)) == 0


def test_a_tiny_temperature_is_greedy() -> None:
    logits = random_logits(1000)
    assert one(logits, row(replace(BASE, temperature=1e-30))) == int(logits.argmax())


def test_logits_are_left_alone() -> None:
    logits = random_logits(2, 50)
    before = logits.clone()
    sample(logits, [row(replace(BASE, top_k=3, logit_bias=((1, 5.0),), min_tokens=4)), row()], (2,))
    assert torch.equal(logits, before)


def test_logits_that_are_not_numbers_are_refused() -> None:
    logits = random_logits(2, 50)
    logits[1, 7] = math.nan
    for sampling in (GREEDY, BASE, replace(BASE, top_p=0.5, top_k=10, min_p=0.1)):
        with pytest.raises(StepFailed):
            sample(logits, [row(sampling)] * 2, ())


@pytest.mark.parametrize("cuts", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_a_row_without_an_allowed_token_is_refused(temperature: float, cuts: dict[str, Any]) -> None:
    logits = random_logits(2, 50)
    logits[1] = -math.inf
    rows = [row(replace(BASE, temperature=temperature, **cuts))] * 2
    with pytest.raises(StepFailed, match="every token is forbidden"):
        sample(logits, rows, ())
    logits[1, 7] = -1e38
    assert sample(logits, rows, ())[1].token == 7


# --- the distribution ------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_softmax(temperature: float) -> None:
    """Pearson's chi squared over 4,000 draws; 11 degrees of freedom exceed 31.3 once in a thousand."""
    draws = 4_000
    logits = random_logits(12) / 3
    rows = [row(replace(BASE, seed=seed, temperature=temperature)) for seed in range(draws)]
    counts = Counter(s.token for s in sample(logits.expand(draws, -1), rows, ()))
    expected = (logits / temperature).softmax(-1) * draws
    chi2 = sum((counts[i] - float(e)) ** 2 / float(e) for i, e in enumerate(expected))
    assert chi2 < 31.3


def test_positions_and_choices_are_independent_draws() -> None:
    logits = torch.zeros(2)
    by_position = [one(logits, row(output=(0,) * n)) for n in range(400)]
    by_choice = [one(logits, row(choice=n)) for n in range(400)]
    for coins in (by_position, by_choice):
        assert 140 < sum(coins) < 260
        changes = sum(a != b for a, b in pairwise(coins))
        assert 140 < changes < 260


def test_noise_is_gumbel() -> None:
    """Mean (Euler's constant), variance (pi^2 / 6) and the extreme tail of a million values."""
    noise = gumbel_noise([noise_key(3, 0, n) for n in range(20)], 50_000, CPU).double()
    assert float(noise.mean()) == pytest.approx(0.57722, abs=0.006)
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, abs=0.02)
    assert bool(noise.isfinite().all())
    above = int((noise > 10).sum())
    assert above == pytest.approx(1e6 * (1 - math.exp(-math.exp(-10))), abs=25)


def plain_noise(key: int, token: int) -> float:
    """The noise of one token, in Python's integers and double precision."""

    def mix(x: int) -> int:
        x = ((x ^ (x >> 16)) * 0x21F0AAAD) % 2**32
        x = ((x ^ (x >> 15)) * 0xD35A2D97) % 2**32
        return x ^ (x >> 15)

    bits = mix(mix((token * 0x1E3779B1 + key) % 2**32) ^ (key >> 32)) % 2**31
    return -math.log(-math.log1p(-(bits + 0.5) / 2**31))


def test_noise_has_not_changed() -> None:
    """Two workers of different versions must draw alike."""
    keys = [noise_key(seed, 1, 77) for seed in (0, 1, 2**63 - 1)]
    for line, key in zip(gumbel_noise(keys, 300, CPU).tolist(), keys, strict=True):
        assert line == pytest.approx([plain_noise(key, token) for token in range(300)], rel=1e-3)
    # The first output of SplitMix64 for seed 0 is published: 0xE220A8397B1DCDAF.
    assert _splitmix64(0) == 0xE220A8397B1DCDAF
    assert noise_key(0, 0, 0) == 0x238275BC38FCBE91


def test_the_largest_noise_is_exact() -> None:
    """It decides, and it comes from uniform numbers close to zero, where rounding must not move them."""
    keys = [noise_key(seed, 0, 1) for seed in range(40)]
    best = gumbel_noise(keys, 50_000, CPU).max(-1)
    for key, value, token in zip(keys, best.values.tolist(), best.indices.tolist(), strict=True):
        assert value == pytest.approx(plain_noise(key, token), rel=1e-6)
    assert float(best.values.max()) > 13


def test_tokens_depend_on_nothing_but_the_counters() -> None:
    logits = random_logits(6, 300)
    rows = [row(replace(BASE, seed=seed), output=(5,) * seed) for seed in range(6)]
    together = [s.token for s in sample(logits, rows, ())]
    backwards = [s.token for s in sample(logits.flip(0), rows[::-1], ())][::-1]
    singly = [one(line, r) for line, r in zip(logits, rows, strict=True)]
    assert together == backwards == singly


def test_position_counts_from_the_prompts_start() -> None:
    """A resumed request, whose earlier output is given again, draws as if it had never stopped."""
    logits = random_logits(300)
    long_prompt = one(logits, row(prompt=(1, 2, 3, 4, 5)))
    resumed = one(logits, row(prompt=(1, 2, 3), output=(4, 5)))
    assert long_prompt == resumed


# --- cuts ------------------------------------------------------------------------------------------


def plain_allowed(logits: list[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    """The tokens that top_k, then top_p, then min_p leave, in plain Python."""
    order = sorted(range(len(logits)), key=lambda i: -logits[i])
    if top_k:
        order = order[:top_k]
    weights = [math.exp(logits[i] - logits[order[0]]) for i in order]
    total, mass, kept = sum(weights), 0.0, []
    for token, weight in zip(order, weights, strict=True):
        if mass >= top_p:
            break
        kept.append(token)
        mass += weight / total
    return {t for t, w in zip(kept, weights, strict=False) if w >= min_p}


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    vocab=st.sampled_from([2, 10, 3000]),
    top_k=st.sampled_from([0, 1, 5, 100]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.01, 0.3]),
)
def test_cuts_leave_what_a_plain_reference_leaves(
    seed: int, vocab: int, top_k: int, top_p: float, min_p: float
) -> None:
    logits = random_logits(vocab, seed=seed)
    if vocab == 3000:
        logits /= 20  # flat: top_p needs more than the thousand best
    scores = logits.clone()
    restrict(scores, replace(BASE, top_k=top_k, top_p=top_p, min_p=min_p))
    allowed = {i for i, s in enumerate(scores.tolist()) if s > -math.inf}
    expected = plain_allowed(logits.double().tolist(), top_k, top_p, min_p)
    # The float32 sum may end the nucleus one token away from the double sum.
    assert len(allowed ^ expected) <= (vocab == 3000)
    assert int(logits.argmax()) in allowed


def test_cuts_keep_ties() -> None:
    scores = torch.tensor([1.0, 2.0, 2.0, 0.0])
    restrict(scores, replace(BASE, top_k=1))
    assert [i for i, s in enumerate(scores.tolist()) if s > -math.inf] == [1, 2]


def test_only_allowed_tokens_are_drawn() -> None:
    logits = random_logits(1000) / 10
    allowed = set(logits.topk(5).indices.tolist())
    rows = [row(replace(BASE, seed=seed, top_k=5)) for seed in range(300)]
    assert {s.token for s in sample(logits.expand(300, -1), rows, ())} == allowed


# --- penalties, bias, minimum length ---------------------------------------------------------------


def adjusted(sampling: SamplingParams, prompt: tuple[int, ...], output: tuple[int, ...]) -> list[float]:
    """Scores of 20 random tokens after penalties and bias."""
    scores = random_logits(20)
    _adjust(scores, row(sampling, prompt, output), ())
    return scores.tolist()


def test_presence_and_frequency_follow_openais_formula() -> None:
    """mu[j] -> mu[j] - c[j] * alpha_frequency - float(c[j] > 0) * alpha_presence, over the output."""
    prompt, output = (1, 2, 3), (4, 4, 4, 5)
    got = adjusted(replace(GREEDY, frequency_penalty=0.7, presence_penalty=1.5), prompt, output)
    expected = random_logits(20).tolist()
    for token, count in Counter(output).items():
        expected[token] -= count * 0.7 + 1.5
    assert got == pytest.approx(expected, abs=1e-5)


def test_repetition_penalty_equals_that_of_transformers() -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    prompt, output = (1, 2, 3), (4, 4, 5)
    processor: Any = RepetitionPenaltyLogitsProcessor(penalty=1.3)
    expected = processor(torch.tensor([[*prompt, *output]]), random_logits(20)[None])[0].tolist()
    assert adjusted(replace(GREEDY, repetition_penalty=1.3), prompt, output) == pytest.approx(expected)


def test_bias_is_added_before_choosing() -> None:
    logits = random_logits(50)
    assert one(logits, row(replace(GREEDY, logit_bias=((7, 100.0),)))) == 7
    best = int(logits.argmax())
    assert one(logits, row(replace(BASE, logit_bias=((best, -100.0), (999, 5.0))))) != best


def test_ends_are_banned_below_min_tokens() -> None:
    logits = torch.zeros(50)
    logits[[2, 9]] = 50.0
    params = replace(GREEDY, min_tokens=3, stop_token_ids=(9, 999))
    assert one(logits, row(params, output=(5, 5)), eos=(2,)) == 0
    assert one(logits, row(params, output=(5, 5, 5)), eos=(2,)) == 2
    assert one(logits, row(GREEDY), eos=(2,)) == 2


# --- log probabilities -----------------------------------------------------------------------------


def test_logprobs_are_those_of_the_raw_distribution() -> None:
    logits = random_logits(3, 100)
    params = replace(
        BASE, temperature=0.3, top_k=2, frequency_penalty=1.0, logit_bias=((5, 3.0),), logprobs=4
    )
    rows = [row(params, output=(5, 6)), row(GREEDY), row(replace(GREEDY, logprobs=0))]
    first, second, third = sample(logits, rows, ())
    table = torch.log_softmax(logits.double(), -1)
    assert first.logprobs is not None
    assert first.logprobs.logprob == pytest.approx(float(table[0, first.token]), abs=1e-5)
    order = sorted(range(100), key=lambda i: -float(table[0, i]))[:4]
    assert [token for token, _ in first.logprobs.top] == order
    assert [p for _, p in first.logprobs.top] == pytest.approx([float(table[0, i]) for i in order], abs=1e-5)
    assert second.logprobs is None
    assert third.logprobs is not None
    assert third.logprobs.top == ()
    assert third.logprobs.logprob == pytest.approx(float(table[2].max()), abs=1e-5)
