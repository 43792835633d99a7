"""What two servers' streams say of each other, from records made by hand."""

import pytest

from bench.engine.rivals import DECODE_OUTPUT, DECODE_PROMPT, BatchCell, Duel, PromptCell, shared_step_s
from bench.records import RequestRecord


def stream(first: float, step: float, events: int, tokens: int | None = None) -> RequestRecord:
    """A stream of `events` events `step` s apart, that were `tokens` tokens."""
    return RequestRecord(
        due=0.0,
        sent=0.0,
        ended=first + step * events,
        ttft_s=first,
        itl_s=(step,) * (events - 1),
        output_tokens=tokens or events,
    )


def test_the_step_is_taken_only_while_all_streams_run() -> None:
    # The first one is slowed down by the prompt of the second: 10 tokens of 0.1 s, then 30 of 0.02 s.
    slowed = RequestRecord(
        due=0.0, sent=0.0, ended=2.0, ttft_s=0.5, itl_s=(0.1,) * 10 + (0.02,) * 30, output_tokens=41
    )
    late = stream(1.51, 0.02, 41)
    assert shared_step_s([slowed, late]) == pytest.approx(0.02)


def test_two_tokens_in_one_event_are_two_tokens() -> None:
    assert shared_step_s([stream(0.1, 0.04, 50, 100)]) == pytest.approx(0.02)


def test_streams_that_hardly_met_say_nothing() -> None:
    with pytest.raises(ValueError, match="ran together"):
        shared_step_s([stream(0.0, 0.02, 41), stream(0.7, 0.02, 41)])


def test_a_prompt_counts_from_the_time_it_was_sent_to_its_token() -> None:
    records = [stream(ttft, 0.0, 1) for ttft in (0.5, 0.25, 0.1)]
    assert PromptCell(512, 3).figure(records) == pytest.approx(512 / 0.25)


def test_both_servers_get_the_same_prompts_and_never_one_twice() -> None:
    cell = BatchCell(4)
    assert cell.specs(1) == cell.specs(1)
    prompts = {spec.prompt for seed in range(4) for spec in cell.specs(seed)}
    assert len(prompts) == 16
    assert {len(prompt) for prompt in prompts} == {DECODE_PROMPT}
    assert cell.specs(0)[0].max_tokens == DECODE_OUTPUT


def test_more_tokens_a_second_and_fewer_ms_are_both_an_advantage() -> None:
    prompts = Duel(PromptCell(512, 5), ours=[3000.0, 1000.0, 2000.0], peer=[1000.0, 1000.0, 1000.0])
    assert prompts.figures()["prefill_over_peer_512"] == pytest.approx(2)
    assert prompts.advantages == [3, 1, 2]
    streams = Duel(BatchCell(8), ours=[20.0], peer=[30.0])
    assert streams.figures() == {
        "decode_gateway_ms_b8": 20.0,
        "decode_peer_ms_b8": 30.0,
        "decode_over_peer_b8": pytest.approx(1.5),
    }
