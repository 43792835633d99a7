"""Log probabilities of given tokens and the best ones, against a sort of torch's own table."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.engine.sampler import LOWEST, score
from common.errors import StepFailed


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    vocab=st.sampled_from([1, 2, 127, 128, 129, 700, 2560, 3001]),
    count=st.sampled_from([0, 1, 5, 20]),
    levels=st.sampled_from([2, 7, 10**6]),
    crowded=st.booleans(),
)
def test_the_best_are_those_of_a_sort(seed: int, vocab: int, count: int, levels: int, crowded: bool) -> None:
    """With many ties where there are few levels, and with the best all side by side."""
    source = torch.Generator().manual_seed(seed)
    logits = torch.randint(levels, (3, vocab), generator=source) * (20 / levels)
    if crowded:
        logits[1, vocab // 2 : vocab // 2 + count] += 30
    tokens = torch.randint(vocab, (3,), generator=source).tolist()
    table = logits.double().log_softmax(-1)
    for found, token, line in zip(score(logits, tokens, count), tokens, table, strict=True):
        assert found.logprob == pytest.approx(float(line[token]), abs=1e-5)
        ids = [id_ for id_, _ in found.top]
        assert len(set(ids)) == len(ids) == min(count, vocab)
        best = line.sort(descending=True).values[: len(ids)].tolist()
        assert [value for _, value in found.top] == pytest.approx(best, abs=1e-5)
        assert [float(line[id_]) for id_ in ids] == pytest.approx(best, abs=1e-5)
        assert found.top == tuple(sorted(found.top, key=lambda pair: (-pair[1], pair[0])))


def test_what_cannot_be_is_the_lowest_number_there_is() -> None:
    logits = torch.full((1, 1000), -math.inf)
    logits[0, 900] = 1.0
    (found,) = score(logits, [3], 2)
    assert found.logprob == LOWEST
    assert found.top[0] == (900, 0.0)
    assert found.top[1][1] == LOWEST


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 999])
def test_logits_that_are_not_numbers_are_refused(wrong: float, place: int) -> None:
    logits = torch.zeros(2, 1000)
    logits[1, place] = wrong
    with pytest.raises(StepFailed, match="not numbers"):
        score(logits, [0, 0], 5)
    with pytest.raises(StepFailed, match="not numbers"):
        score(torch.full((1, 1000), -math.inf), [0], 5)
