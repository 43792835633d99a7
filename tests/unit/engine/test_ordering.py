"""Who goes first: keys, ranks, aging, and that promises about both hold for any workload."""

import typing
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.clock import VirtualClock
from common.config import EngineSettings
from common.engine.entry import Entry
from common.engine.ordering import (
    DEFAULT_TTFT_S,
    Fcfs,
    Ordering,
    Priority,
    ShortestFirst,
    Slack,
    make_ordering,
    rank_of,
)
from common.engine.prefill_rate import PrefillRate
from common.engine.runner import BatchPlan, PlanRow
from common.engine.sequence import Sequence
from common.engine.waiting import AGING, LEAST_TURN, WaitingLine
from common.errors import ConfigError
from common.ids import SequenceId
from tests.support.sequences import greedy, make_sequence


def waiting(ordering: Ordering, *sequences: Sequence) -> WaitingLine:
    line = WaitingLine(ordering)
    for seq in sequences:
        line.add(entry_of(ordering, seq))
    return line


def entry_of(ordering: Ordering, seq: Sequence) -> Entry:
    return Entry(seq, rank_of(seq, ordering.key(seq, len(seq.tokens))))


def drained(line: WaitingLine) -> list[int]:
    """Sequence numbers in the order of admission."""
    order = []
    while line:
        entry = line.next()
        line.admit(entry)
        order.append(int(entry.seq.id))
    return order


def make(
    number: int,
    length: int = 10,
    *,
    arrival: float | None = None,
    priority: int = 0,
    ttft_s: float | None = None,
    num_output: int = 0,
) -> Sequence:
    seq = make_sequence(number, [1] * length, arrival=arrival, priority=priority, ttft_s=ttft_s)
    seq.tokens += [2] * num_output
    return seq


def prefill_rate(tokens: int, seconds: float) -> PrefillRate:
    rate = PrefillRate()
    row = PlanRow(SequenceId(0), [1] * tokens, 0, tokens, tokens, (), True, 0, greedy(1))
    rate.observe(BatchPlan(1, (row,)), seconds)
    return rate


def test_every_ordering_that_can_be_configured_is_made_and_no_other() -> None:
    names = typing.get_args(EngineSettings.model_fields["ordering"].annotation)
    clock, rate = VirtualClock(), PrefillRate()
    assert [make_ordering(name, clock, rate) for name in names] == [
        Fcfs(),
        ShortestFirst(),
        Slack(clock, rate),
        Priority(),
    ]
    assert EngineSettings.model_fields["ordering"].default == "fcfs"
    with pytest.raises(ConfigError, match="shortest_first"):
        make_ordering("lifo", clock, rate)


def test_fcfs_is_by_arrival_at_the_gateway_whatever_else_a_request_says() -> None:
    line = waiting(Fcfs(), make(0, 5, arrival=9), make(1, 90, arrival=3, priority=7), make(2, arrival=4))
    assert drained(line) == [1, 2, 0]


def test_shortest_first_is_by_tokens_to_compute_and_lets_streams_go_on() -> None:
    line = waiting(ShortestFirst(), make(0, 30), make(1, 20), make(2, 20), make(3, 40, num_output=2))
    assert drained(line) == [3, 1, 2, 0]


def test_priority_is_lower_first_and_then_by_arrival() -> None:
    line = waiting(
        Priority(),
        make(0, priority=1),
        make(1),
        make(2, priority=-5),
        make(3, arrival=0.5),
        make(4, priority=1),
    )
    assert drained(line) == [2, 3, 1, 0, 4]


def test_slack_is_the_budget_less_the_time_that_the_prompt_takes() -> None:
    clock = VirtualClock(100.0)
    ordering = Slack(clock, prefill_rate(tokens=1000, seconds=2.0))
    long = make(0, 500, arrival=100.0, ttft_s=2.0)  # has to start by 101.0
    short = make(1, 50, arrival=100.0, ttft_s=1.5)  # by 101.4
    none = make(2, 50, arrival=99.9)
    assert ordering.key(long, 500) == pytest.approx(101.0)
    assert ordering.key(short, 50) == pytest.approx(101.4)
    assert ordering.key(none, 50) == pytest.approx(99.9 + DEFAULT_TTFT_S - 0.1)
    assert drained(waiting(ordering, none, short, long)) == [0, 1, 2]


def test_slack_lets_those_go_first_who_can_still_make_it_but_streams_before_them() -> None:
    clock = VirtualClock(100.0)
    ordering = Slack(clock, PrefillRate())
    lost, streaming = make(0, arrival=97.0, ttft_s=2.0), make(1, arrival=96.0, ttft_s=2.0, num_output=3)
    tight, loose = make(2, arrival=99.0, ttft_s=2.0), make(3, arrival=99.0, ttft_s=9.0)
    assert drained(waiting(ordering, lost, streaming, tight, loose)) == [1, 2, 3, 0]
    line = waiting(ordering, lost, tight, loose)
    clock.advance(1.5)
    assert drained(line) == [3, 0, 2]
    assert drained(waiting(ordering, tight, lost)) == [0, 2]


def test_the_oldest_gets_its_turn_after_four_times_its_own_tokens_and_keeps_it() -> None:
    ordering, tokens = Priority(), 2 * LEAST_TURN
    line = waiting(ordering, make(0, tokens, priority=9), *(make(number, tokens) for number in range(1, 9)))
    for number in range(1, 5):
        line.admit(entry := line.next())
        assert (entry.seq.id, entry.senior) == (number, False)
    assert [line.next().seq.id for _ in range(3)] == [0, 0, 0]  # until it fits
    line.admit(turn := line.next())
    assert turn.senior
    line.add(turn)  # preempted
    assert line.next() is turn


def test_short_ones_have_no_turn_more_often_than_long_ones() -> None:
    line = waiting(Priority(), make(0, 1, priority=9), *(make(number, 500) for number in range(1, 30)))
    assert drained(line).index(0) == -(-AGING * LEAST_TURN // 500)


def test_who_is_gone_is_not_waited_for() -> None:
    ordering = Priority()
    old, second = (entry_of(ordering, make(number, LEAST_TURN, priority=9)) for number in range(2))
    line = waiting(ordering, *(make(number, LEAST_TURN) for number in range(2, 12)))
    line.add(old)
    line.add(second)
    for _ in range(AGING):
        line.admit(line.next())
    line.remove(old)
    assert drained(line)[: AGING + 1] == [6, 7, 8, 9, 1]


def test_with_fcfs_nobody_is_ever_passed() -> None:
    line = waiting(Fcfs(), *(make(number, 1000 * (number % 7 + 1), arrival=-number) for number in range(30)))
    entries = []
    while line:
        entries.append(line.next())
        line.admit(entries[-1])
    assert [entry.seq.id for entry in entries] == list(range(29, -1, -1))
    assert not any(entry.senior for entry in entries)


jobs = st.tuples(
    st.one_of(st.integers(1, 40), st.integers(1000, 9000)),
    st.integers(-2, 2),
    st.sampled_from([None, 0.5, 3.0, 1e6]),
    st.booleans(),
)
orderings = st.sampled_from(["fcfs", "shortest_first", "slack", "priority"])


@given(st.lists(jobs, min_size=1, max_size=80), orderings, st.randoms(use_true_random=False))
def test_the_wait_is_bounded_in_tokens_whatever_comes_after(
    work: list[tuple[int, int, float | None, bool]], name: str, random: typing.Any
) -> None:
    """The bound that WaitingLine promises."""
    clock = VirtualClock(0.0)
    ordering = make_ordering(name, clock, prefill_rate(10, 1.0))
    line = WaitingLine(ordering)
    longest = max(length for length, *_ in work)
    bounds: dict[int, int] = {}
    passed: dict[int, int] = {}
    ahead: dict[int, set[int]] = {}
    lengths: dict[int, int] = {}
    arrivals = deque(enumerate(work))
    while arrivals or line:
        clock.advance(random.random())
        if arrivals and (not line or random.random() < 0.6):
            number, (length, priority, ttft_s, streams) = arrivals.popleft()
            seq = make(number, length, arrival=clock.now(), priority=priority, ttft_s=ttft_s)
            seq.tokens += [3] * streams
            lengths[number] = len(seq.tokens)
            ahead[number] = {number, *passed}
            bounds[number] = sum(AGING * max(LEAST_TURN, lengths[n]) + longest + 1 for n in ahead[number])
            passed[number] = 0
            line.add(entry_of(ordering, seq))
        else:
            entry = line.next()
            line.admit(entry)
            admitted = int(entry.seq.id)
            for other in passed:
                if admitted not in ahead[other]:
                    passed[other] += lengths[admitted]
            assert passed.pop(admitted) <= bounds[admitted]


def test_the_prefill_rate_is_of_prompts_and_of_late() -> None:
    rate = PrefillRate()
    assert rate.seconds(1000) == 0.0
    decode = PlanRow(SequenceId(0), [1] * 9, 8, 1, 5, (), True, 0, greedy(9))
    rate.observe(BatchPlan(1, (decode,)), 5.0)
    assert rate.seconds(1000) == 0.0
    prompt = PlanRow(SequenceId(1), [1] * 100, 0, 100, 100, (), True, 0, greedy(9))
    rate.observe(BatchPlan(2, (decode, prompt)), 0.2)
    assert rate.seconds(1000) == pytest.approx(2.0)
    for step in range(200):
        rate.observe(BatchPlan(step, (prompt,)), 0.1)
    assert rate.seconds(1000) == pytest.approx(1.0, rel=1e-3)
