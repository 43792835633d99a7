"""After a failure the pool is left alone, longer after each, and used again after a success."""

from common.clock import VirtualClock
from common.kv.pool.backoff import FIRST_S, LONGEST_S, Backoff


def test_each_failed_trial_doubles_the_time_up_to_a_limit() -> None:
    clock = VirtualClock()
    backoff = Backoff(clock)
    waits, usable = [], [backoff.usable]
    for _ in range(8):
        waits.append(backoff.failed())
        usable.append(backoff.usable)
        for _ in range(2):
            clock.advance(waits[-1] / 2)
            usable.append(backoff.usable)
    assert waits == [FIRST_S, 2, 4, 8, 16, LONGEST_S, LONGEST_S, LONGEST_S]
    assert usable == [True, *([False, False, True] * 8)]


def test_failures_of_calls_under_way_count_as_one() -> None:
    clock = VirtualClock()
    backoff = Backoff(clock)
    backoff.failed()
    clock.advance(0.25)
    assert backoff.failed() == FIRST_S - 0.25
    clock.advance(0.75)
    assert backoff.usable


def test_a_success_starts_anew() -> None:
    clock = VirtualClock()
    backoff = Backoff(clock)
    backoff.failed()
    clock.advance(FIRST_S)
    backoff.failed()
    backoff.succeeded()
    assert backoff.usable
    assert backoff.failed() == FIRST_S
