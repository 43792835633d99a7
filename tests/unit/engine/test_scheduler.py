"""The scheduler's rules one at a time; test_scheduler_properties.py mixes them."""

from dataclasses import replace

import pytest

from common.clock import VirtualClock
from common.engine.ordering import Ordering, Priority, ShortestFirst, Slack
from common.engine.policy import DecodeFirst, PrefillFirst
from common.engine.prefill_rate import PrefillRate
from common.engine.runner import BatchPlan, SampledToken, StepResult
from common.engine.runner_fake import FakeModel, FakeRunner
from common.engine.scheduler import Scheduler, StepOutput
from common.engine.waiting import AGING, LEAST_TURN
from common.errors import ContextLengthExceeded, GalleyError, InvalidRequest, PoolExhausted
from common.ids import SequenceId
from tests.support.leaks import assert_pool_idle
from tests.support.sequences import greedy, make_scheduler, make_sequence

MODEL = FakeModel()
SIZE = MODEL.layout.block_size


def step(scheduler: Scheduler, token: int = 7) -> tuple[dict[int, int], list[StepOutput]]:
    """One plan whose samples all yield `token`: tokens computed per sequence, and the outputs."""
    plan = scheduler.plan()
    assert plan is not None
    return shares(plan), scheduler.complete(plan, result_of(plan, token))


def shares(plan: BatchPlan) -> dict[int, int]:
    return {row.seq: row.count for row in plan.rows}


def result_of(plan: BatchPlan, token: int = 7) -> StepResult:
    return StepResult(plan.step, {row.seq: SampledToken(token) for row in plan.rows if row.sample})


def run(scheduler: Scheduler, runner: FakeRunner) -> dict[int, list[int]]:
    """Step until nothing is left to plan; output tokens per sequence."""
    tokens: dict[int, list[int]] = {}
    while (plan := scheduler.plan()) is not None:
        for output in scheduler.complete(plan, runner.execute(plan)):
            tokens.setdefault(output.seq.id, []).append(output.token)
    return tokens


def test_prefill_first_computes_whole_prompts_then_decodes() -> None:
    scheduler = make_scheduler(MODEL, 32, PrefillFirst(), max_num_batched_tokens=50)
    for number, length in enumerate((30, 15, 10)):
        scheduler.add(make_sequence(number, [1] * length))
    assert step(scheduler)[0] == {0: 30, 1: 15}
    assert step(scheduler)[0] == {2: 10}
    assert step(scheduler)[0] == {0: 1, 1: 1, 2: 1}


def test_prefill_first_cuts_only_a_prompt_above_the_budget() -> None:
    scheduler = make_scheduler(MODEL, 32, PrefillFirst(), max_num_batched_tokens=50)
    scheduler.add(make_sequence(0, [1] * 101))
    scheduler.add(make_sequence(1, [1] * 10))
    assert [step(scheduler)[0] for _ in range(4)] == [{0: 50}, {0: 50}, {0: 1, 1: 10}, {0: 1, 1: 1}]


def test_decode_first_fills_the_step_with_chunks() -> None:
    scheduler = make_scheduler(MODEL, 32, DecodeFirst(chunk_tokens=20), max_num_batched_tokens=32)
    scheduler.add(make_sequence(0, [1] * 10))
    assert step(scheduler)[0] == {0: 10}
    scheduler.add(make_sequence(1, [1] * 30))
    scheduler.add(make_sequence(2, [1] * 30))
    assert step(scheduler)[0] == {0: 1, 1: 20, 2: 11}
    assert step(scheduler)[0] == {0: 1, 1: 10, 2: 19}
    assert step(scheduler)[0] == {0: 1, 1: 1, 2: 1}


def test_the_oldest_goes_first_whatever_the_order_of_adding() -> None:
    scheduler = make_scheduler(MODEL, 2, PrefillFirst())
    scheduler.add(make_sequence(0, [1] * 20, arrival=5.0))
    scheduler.add(make_sequence(1, [1] * 20, arrival=1.0))
    assert step(scheduler)[0] == {1: 20}
    assert (scheduler.num_waiting, scheduler.num_running) == (1, 1)


def test_admission_takes_blocks_for_all_tokens_and_the_next() -> None:
    scheduler = make_scheduler(MODEL, 4)
    scheduler.add(make_sequence(0, [1] * 2 * SIZE))
    handed = make_sequence(1, [1] * SIZE, hand_over=True)
    scheduler.add(handed)
    scheduler.plan()
    assert scheduler.pool.num_used == 3 + 1
    assert len(handed.blocks) == 1


def test_eos_stop_ids_and_lengths_end_a_sequence() -> None:
    model = replace(MODEL, eos_token_ids=(9,), max_model_len=12)
    cases = [
        (greedy(5), 9, 1, "stop"),
        (replace(greedy(5), ignore_eos=True), 9, 5, "length"),
        (replace(greedy(5), min_tokens=3), 9, 3, "stop"),
        (replace(greedy(5), stop_token_ids=(4,)), 4, 1, "stop"),
        (greedy(5), 4, 5, "length"),
        (greedy(50), 4, 9, "length"),
    ]
    for sampling, token, expected_count, reason in cases:
        scheduler = make_scheduler(model, 8)
        scheduler.add(make_sequence(0, [1, 2, 3], sampling))
        outputs = []
        while not scheduler.is_empty:
            outputs += step(scheduler, token)[1]
        assert [output.finish for output in outputs] == [None] * (expected_count - 1) + [reason]
        assert [output.index for output in outputs] == list(range(expected_count))
        assert_pool_idle(scheduler.pool)


def test_hand_over_ends_after_one_token_unless_that_finishes() -> None:
    scheduler = make_scheduler(replace(MODEL, eos_token_ids=(9,)), 8)
    scheduler.add(make_sequence(0, [1, 2], hand_over=True))
    (output,) = step(scheduler, 7)[1]
    assert (output.finish, output.handed_over) == (None, True)
    scheduler.add(make_sequence(1, [1, 2], hand_over=True))
    (output,) = step(scheduler, 9)[1]
    assert (output.finish, output.handed_over) == ("stop", False)
    assert scheduler.is_empty


def test_a_resumed_sequence_counts_from_the_request_s_first_token() -> None:
    scheduler = make_scheduler(MODEL, 8)
    seq = make_sequence(0, [1, 2, 3], greedy(4))
    seq.tokens += [7, 7]
    scheduler.add(seq)
    assert [step(scheduler)[1][0].index for _ in range(2)] == [2, 3]
    assert scheduler.is_empty


def test_imported_kv_is_not_recomputed() -> None:
    scheduler = make_scheduler(MODEL, 8)
    seq = make_sequence(0, [1] * 20)
    seq.tokens.append(7)
    seq.blocks, seq.num_computed = scheduler.pool.allocate(2), 20
    scheduler.add(seq)
    assert (scheduler.num_waiting, scheduler.num_running) == (0, 1)
    assert step(scheduler)[0] == {0: 1}
    assert scheduler.admitted == ()


def test_the_youngest_is_preempted_and_computes_the_same_tokens_again() -> None:
    prompts = {0: [1] * 15, 1: [2] * 15, 2: [3] * 15}
    scheduler = make_scheduler(MODEL, 6)
    for number, prompt in prompts.items():
        scheduler.add(make_sequence(number, prompt, greedy(40)))
    tokens = run(scheduler, FakeRunner(MODEL, 6))
    assert tokens == {n: MODEL.expected_tokens(prompt, greedy(40)) for n, prompt in prompts.items()}
    assert scheduler.num_preemptions == 2
    assert scheduler.num_recomputed_tokens > 0
    assert_pool_idle(scheduler.pool)


def test_a_younger_decode_waits_for_an_older_prompt_and_does_not_take_its_blocks() -> None:
    scheduler = make_scheduler(MODEL, 4, max_num_batched_tokens=17)
    scheduler.add(make_sequence(1, [1] * 15, greedy(40)))
    step(scheduler)
    old = make_sequence(0, [2] * (2 * SIZE + 9))
    scheduler.add(old)
    assert step(scheduler)[0] == {1: 1, 0: SIZE}
    assert step(scheduler)[0] == {0: SIZE}
    assert (scheduler.num_preemptions, old.num_computed) == (0, 2 * SIZE)


def test_headroom_is_left_for_those_who_grow() -> None:
    scheduler = make_scheduler(MODEL, 9, headroom_tokens=2 * SIZE)
    for number, length in enumerate((20, 5, 20)):
        scheduler.add(make_sequence(number, [number] * 15, greedy(length)))
    assert step(scheduler)[0] == {0: 15, 1: 15, 2: 15}
    # The first and the third end in their third blocks, the second in its second.
    assert (scheduler.pool.num_free, scheduler.headroom) == (6, 5)
    scheduler.add(make_sequence(3, [3] * 20, hand_over=True))
    assert step(scheduler)[0] == {0: 1, 1: 1, 2: 1}
    for _ in range(3):
        step(scheduler)
    assert step(scheduler)[0] == {0: 1, 2: 1, 3: 16}
    assert scheduler.headroom == 2


def test_the_lowest_priority_is_preempted_whoever_is_older() -> None:
    scheduler = make_scheduler(MODEL, 3, ordering=Priority())
    for number, priority in ((0, 5), (1, 0)):
        scheduler.add(make_sequence(number, [number] * 15, greedy(40), priority=priority))
    while scheduler.num_preemptions == 0:
        step(scheduler)
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 1)
    assert step(scheduler)[0] == {1: 1}


def test_the_first_token_puts_a_stream_before_prompts() -> None:
    scheduler = make_scheduler(MODEL, 8, ordering=ShortestFirst())
    scheduler.add(make_sequence(0, [1] * 60, greedy(40)))
    while scheduler.num_running == 0 or scheduler.horizon() == 0:
        step(scheduler)
    scheduler.add(make_sequence(1, [2] * 15, greedy(40)))
    step(scheduler)
    while scheduler.num_preemptions == 0:
        step(scheduler)
    assert step(scheduler)[0] == {0: 1}  # the younger stream was preempted, not the longer prompt


@pytest.mark.parametrize("ordering", [ShortestFirst(), Priority(), Slack(VirtualClock(), PrefillRate())])
def test_nobody_starves_under_a_stream_of_better_ones(ordering: Ordering) -> None:
    """More comes than can be computed, always with a better rank; the pool is short as well."""
    scheduler = make_scheduler(MODEL, 40, ordering=ordering, max_num_seqs=4)
    scheduler.add(make_sequence(0, [1] * 300, greedy(40), priority=9, ttft_s=1e6))
    computed, number = 0, 0
    while scheduler.find(SequenceId(0)) is not None:
        while scheduler.num_waiting < 8:
            number += 1
            scheduler.add(make_sequence(number, [number] * 90, greedy(20), arrival=1.0, ttft_s=1.0))
        computed += sum(step(scheduler)[0].values())
        assert computed < 2 * AGING * LEAST_TURN
    assert computed > AGING * LEAST_TURN


def test_a_preempted_sequence_is_queued_with_all_its_tokens() -> None:
    scheduler = make_scheduler(MODEL, 3, PrefillFirst())
    for number in range(2):
        scheduler.add(make_sequence(number, [1] * 15, greedy(40)))
    while scheduler.num_preemptions == 0:
        step(scheduler)
    assert (scheduler.num_waiting, scheduler.num_running, scheduler.pool.num_used) == (1, 1, 3)
    assert scheduler.queued_tokens == 17


def test_a_sequence_that_alone_fills_the_pool_finishes_with_length() -> None:
    scheduler = make_scheduler(MODEL, 2, PrefillFirst())
    scheduler.add(make_sequence(0, [1] * 2 * SIZE, greedy(100)))
    outputs = step(scheduler)[1]
    assert [output.finish for output in outputs] == ["length"]
    scheduler.add(make_sequence(1, [1] * SIZE, greedy(100)))
    outputs = [output for _ in range(SIZE + 1) for output in step(scheduler)[1]]
    assert [output.finish for output in outputs] == [None] * SIZE + ["length"]
    assert_pool_idle(scheduler.pool)


def test_a_decode_waits_in_place_for_blocks_held_outside() -> None:
    scheduler = make_scheduler(MODEL, 3, PrefillFirst())
    seq = make_sequence(0, [1] * (2 * SIZE - 1), greedy(10))
    scheduler.add(seq)
    step(scheduler)
    lease = scheduler.pool.allocate(1)
    assert step(scheduler)[0] == {0: 1}
    assert scheduler.plan() is None
    scheduler.pool.release(lease)
    assert step(scheduler)[0] == {0: 1}
    assert seq.num_computed == 2 * SIZE + 1


def test_hand_over_is_never_preempted() -> None:
    scheduler = make_scheduler(MODEL, 3, max_num_batched_tokens=17)
    scheduler.add(make_sequence(0, [1] * 15, greedy(40)))
    step(scheduler)
    scheduler.add(make_sequence(1, [2] * 2 * SIZE, hand_over=True))
    assert step(scheduler)[0] == {0: 1, 1: SIZE}
    assert step(scheduler)[0] == {1: SIZE}
    assert scheduler.num_preemptions == 0


def test_prefix_hits_skip_full_blocks_and_are_counted_once() -> None:
    scheduler = make_scheduler(MODEL, 8, cached=True)
    runner = FakeRunner(MODEL, 8)
    prompt = [5] * 40
    scheduler.add(make_sequence(0, prompt))
    first = run(scheduler, runner)[0]
    again = make_sequence(1, prompt)
    scheduler.add(again)
    plan = scheduler.plan()
    assert plan is not None
    assert (plan.rows[0].start, plan.rows[0].count, again.num_cached) == (32, 8, 32)
    outputs = scheduler.complete(plan, runner.execute(plan))
    assert [outputs[0].token, *run(scheduler, runner)[1]] == first


def test_an_abort_frees_at_once_unless_a_plan_is_outstanding() -> None:
    scheduler = make_scheduler(MODEL, 8)
    for number in range(3):
        scheduler.add(make_sequence(number, [1] * 16))
    assert scheduler.abort(SequenceId(2))
    plan = scheduler.plan()
    assert plan is not None
    assert scheduler.abort(SequenceId(0))
    assert not scheduler.abort(SequenceId(0))
    assert scheduler.find(SequenceId(0)) is None
    assert scheduler.pool.num_used == 4
    assert [output.seq.id for output in scheduler.complete(plan, result_of(plan))] == [1]
    assert scheduler.pool.num_used == 2
    assert scheduler.abort(SequenceId(1))
    assert not scheduler.abort(SequenceId(1))
    assert scheduler.is_empty
    assert_pool_idle(scheduler.pool)


def test_a_failed_plan_loses_only_its_own_sequences() -> None:
    scheduler = make_scheduler(MODEL, 8, max_num_batched_tokens=16)
    for number in range(2):
        scheduler.add(make_sequence(number, [1] * 16))
    plan = scheduler.plan()
    assert plan is not None
    assert [seq.id for seq in scheduler.fail(plan)] == [0]
    assert step(scheduler)[0] == {1: 16}
    with pytest.raises(ValueError, match="not outstanding"):
        scheduler.complete(plan, result_of(plan))


def test_several_plans_outstanding_share_no_sequence() -> None:
    scheduler = make_scheduler(MODEL, 16, max_num_batched_tokens=16)
    for number in range(3):
        scheduler.add(make_sequence(number, [1] * 16))
    plans = [scheduler.plan() for _ in range(4)]
    assert [shares(plan) for plan in plans if plan] == [{0: 16}, {1: 16}, {2: 16}]
    assert plans[1] is not None
    scheduler.complete(plans[1], result_of(plans[1]))
    assert step(scheduler)[0] == {1: 1}


def test_what_can_never_run_is_refused_and_leaves_nothing() -> None:
    scheduler = make_scheduler(replace(MODEL, max_model_len=100), 4)
    for length, error in ((0, InvalidRequest), (100, ContextLengthExceeded), (65, PoolExhausted)):
        with pytest.raises(error):
            scheduler.add(make_sequence(0, [1] * length))
    assert scheduler.is_empty
    seq = make_sequence(1, [1] * 20)
    seq.num_computed = 10
    with pytest.raises(ValueError, match="no blocks"):
        scheduler.add(seq)
    scheduler.add(make_sequence(2, [1]))
    with pytest.raises(ValueError, match="already"):
        scheduler.add(make_sequence(2, [1]))


def test_load_is_what_is_queued_and_what_is_held() -> None:
    scheduler = make_scheduler(MODEL, 4, max_num_batched_tokens=16)
    scheduler.add(make_sequence(0, [1] * 20))
    scheduler.add(make_sequence(1, [1] * 50))
    assert (scheduler.queued_tokens, scheduler.running_tokens) == (70, 0)
    step(scheduler)
    assert (scheduler.queued_tokens, scheduler.running_tokens) == (54, 16)
    step(scheduler)
    assert (scheduler.queued_tokens, scheduler.running_tokens) == (50, 20)


def test_horizon_sees_lengths_blocks_and_company() -> None:
    scheduler = make_scheduler(MODEL, 3, max_num_seqs=2)
    assert scheduler.horizon() == 0
    scheduler.add(make_sequence(0, [1] * 10, greedy(12)))
    assert scheduler.horizon() == 0
    step(scheduler)
    assert scheduler.horizon() == 11
    scheduler.add(make_sequence(1, [1] * 10, greedy(30)))
    assert scheduler.horizon() == 0
    step(scheduler)
    scheduler.add(make_sequence(2, [1] * 10))
    assert scheduler.horizon() == 6  # then both want a second block and one is free


def test_a_sequence_ends_with_stop_where_its_grammar_is_complete() -> None:
    scheduler = make_scheduler(MODEL, 8)
    scheduler.add(make_sequence(0, [1] * 4, replace(greedy(8), min_tokens=5)))
    plan = scheduler.plan()
    assert plan is not None
    (output,) = scheduler.complete(plan, StepResult(plan.step, {SequenceId(0): SampledToken(7, ends=True)}))
    assert (output.finish, output.handed_over) == ("stop", False)
    assert scheduler.is_empty


def test_a_failed_sequence_is_dropped_and_the_next_plan_tells_who_is_gone() -> None:
    scheduler = make_scheduler(MODEL, 8)
    for number in (0, 1):
        scheduler.add(make_sequence(number, [1] * 4))
    plan = scheduler.plan()
    assert plan is not None
    assert plan.gone == ()
    failed: dict[SequenceId, GalleyError] = {SequenceId(0): InvalidRequest("no")}
    result = StepResult(plan.step, {SequenceId(1): SampledToken(7)}, failed)
    assert [output.seq.id for output in scheduler.complete(plan, result)] == [1]
    after = scheduler.plan()
    assert after is not None
    assert after.gone == (0,)
    scheduler.abort(SequenceId(1))
    scheduler.complete(after, result_of(after))
    assert scheduler.is_empty
    assert_pool_idle(scheduler.pool)
