"""How policies cut prompts."""

import pytest

from common.engine.policy import DecodeFirst, PrefillFirst, TokenBudget, make_policy
from common.errors import ConfigError


def test_prefill_first_takes_whole_prompts_or_none() -> None:
    policy = PrefillFirst()
    assert policy.chunk(30, left=64, first=True) == 30
    assert policy.chunk(30, left=20, first=False) == 0
    assert policy.chunk(30, left=20, first=True) == 20


def test_decode_first_takes_what_is_left_in_chunks() -> None:
    policy = DecodeFirst(chunk_tokens=16)
    assert policy.chunk(30, left=64, first=True) == 16
    assert policy.chunk(30, left=5, first=False) == 5
    assert policy.chunk(3, left=5, first=False) == 3


def test_policies_have_names() -> None:
    assert make_policy("prefill_first", 8) == PrefillFirst()
    assert make_policy("decode_first", 8) == DecodeFirst(8)
    with pytest.raises(ConfigError, match="prefill_first or decode_first"):
        make_policy("fastest", 8)


def test_a_budget_is_spent_in_tokens_and_sequences() -> None:
    budget = TokenBudget(tokens=10, sequences=2)
    budget.spend(10)
    assert budget.exhausted
    budget = TokenBudget(tokens=10, sequences=2)
    budget.spend(1)
    assert not budget.exhausted
    budget.spend(1)
    assert budget.exhausted
