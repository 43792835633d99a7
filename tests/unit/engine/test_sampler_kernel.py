"""The drawing operator against the sampler's own torch, which test_sampler.py holds to plain references."""

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from common.engine.runner import PlanRow
from common.engine.sampler import sample
from common.errors import StepFailed
from common.ids import SequenceId
from common.messages.generation import SamplingParams

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("operators")]

BASE = SamplingParams(max_tokens=10, seed=1)
GREEDY = replace(BASE, temperature=0.0)


def row(sampling: SamplingParams = BASE, choice: int = 0) -> PlanRow:
    return PlanRow(SequenceId(1), [1, 2, 3], 2, 1, 3, (), True, choice, sampling)


def random_logits(rows: int, vocab: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def by_kernel(logits: Tensor, rows: list[PlanRow]) -> list[int]:
    return [one.token for one in sample(logits, rows, (), kernels=True)]


def by_torch(logits: Tensor, rows: list[PlanRow]) -> list[int]:
    return [one.token for one in sample(logits, rows, ())]


WISHES = st.builds(
    SamplingParams,
    max_tokens=st.just(10),
    seed=st.integers(0, (1 << 63) - 1),
    temperature=st.sampled_from([0.0, 1e-4, 0.3, 1.0, 1.7, 100.0]),
    top_k=st.sampled_from([0, 1, 2, 40, 1500, 10**6]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.01, 0.3]),
)


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    vocab=st.sampled_from([1, 2, 15, 16, 17, 250, 3001]),
    scale=st.sampled_from([0.01, 1.0, 5.0, 1000.0]),
    forbidden=st.sampled_from([-math.inf, 1.0]),
    wishes=st.lists(WISHES, min_size=4, max_size=4),
)
def test_it_draws_the_same_tokens(
    seed: int, vocab: int, scale: float, forbidden: float, wishes: list[SamplingParams]
) -> None:
    """Whatever the shape of the distribution, the cuts, and how many tokens a grammar has set to -inf."""
    logits = random_logits(4, vocab, seed) * scale
    logits.masked_fill_(logits < forbidden, forbidden)
    rows = [row(one, choice=n) for n, one in enumerate(wishes)]
    assert by_kernel(logits, rows) == by_torch(logits, rows)


def test_it_draws_the_same_tokens_of_a_large_vocabulary() -> None:
    """Flat rows, where noise decides alone, and its rarest and largest values most of all."""
    logits = torch.zeros(60, 100_003)
    rows = [row(replace(BASE, seed=seed, temperature=0.5 + seed % 2)) for seed in range(60)]
    assert by_kernel(logits, rows) == by_torch(logits, rows)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_softmax(temperature: float) -> None:
    """Pearson's chi squared over 4,000 draws; 39 degrees of freedom exceed 72.1 once in a thousand."""
    draws = 4_000
    logits = random_logits(1, 40)[0] / 3
    rows = [row(replace(BASE, seed=seed, temperature=temperature)) for seed in range(draws)]
    counts = Counter(by_kernel(logits.expand(draws, -1), rows))
    expected = (logits / temperature).softmax(-1) * draws
    chi2 = sum((counts[i] - float(e)) ** 2 / float(e) for i, e in enumerate(expected))
    assert chi2 < 72.1


def test_ties_go_to_the_lowest_id() -> None:
    logits = torch.zeros(1, 500)
    logits[0, [17, 90, 400]] = 1.0
    assert by_kernel(logits, [row(GREEDY)]) == [17]
    assert by_kernel(torch.zeros(1, 500), [row(GREEDY)]) == [0]


def test_cuts_keep_ties_and_nothing_below() -> None:
    logits = torch.full((1, 1000), 3.0)
    best, next_best = {7, 900}, set(range(0, 1000, 50)) - {900}
    logits[0, list(next_best)] = 4.0
    logits[0, list(best)] = 5.0
    for cut, allowed in (
        (replace(BASE, top_k=5), best | next_best),
        (replace(BASE, top_p=0.001), best),
        (replace(BASE, min_p=0.3), best | next_best),
    ):
        rows = [row(replace(cut, seed=seed)) for seed in range(600)]
        assert set(by_kernel(logits.expand(600, -1), rows)) == allowed


@pytest.mark.parametrize("place", [0, 7, 49])
@pytest.mark.parametrize(
    "sampling", [GREEDY, BASE, replace(BASE, top_p=0.5, top_k=10, min_p=0.1), replace(BASE, top_p=0.5)]
)
def test_logits_that_are_not_numbers_are_refused(place: int, sampling: SamplingParams) -> None:
    logits = random_logits(2, 50)
    logits[1, place] = math.nan
    with pytest.raises(StepFailed):
        by_kernel(logits, [row(sampling)] * 2)


@pytest.mark.parametrize("cuts", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("vocab", [1, 16, 50])
def test_a_row_without_an_allowed_token_is_refused(
    vocab: int, temperature: float, cuts: dict[str, Any]
) -> None:
    logits = random_logits(2, vocab)
    logits[1] = -math.inf
    rows = [row(replace(BASE, temperature=temperature, **cuts))] * 2
    with pytest.raises(StepFailed, match="every token is forbidden"):
        by_kernel(logits, rows)
    logits[1, vocab - 1] = -1e38
    assert by_kernel(logits, rows)[1] == vocab - 1


def test_rows_may_lie_apart_but_not_be_torn_or_of_another_type() -> None:
    logits = random_logits(6, 300)
    rows = [row(replace(BASE, seed=seed)) for seed in range(3)]
    assert by_kernel(logits[::2], rows) == by_kernel(logits[::2].contiguous(), rows)
    for wrong in (logits.T[:3], logits[:3].double()):
        with pytest.raises(RuntimeError, match="logits must be float32"):
            by_kernel(wrong, rows)


def test_tokens_depend_on_nothing_but_their_own_row() -> None:
    logits = random_logits(6, 300)
    rows = [row(replace(BASE, seed=seed, top_p=0.9)) for seed in range(6)]
    together = by_kernel(logits, rows)
    singly = [by_kernel(line[None], [one])[0] for line, one in zip(logits, rows, strict=True)]
    assert together == by_kernel(logits.flip(0), rows[::-1])[::-1] == singly
