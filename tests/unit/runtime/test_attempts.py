"""Jobs and aborts may be repeated and may overtake each other."""

from common.clock import VirtualClock
from common.ids import AttemptKey, RequestId
from common.runtime.attempts import AttemptTable

R = RequestId("r")


def test_an_abort_that_overtakes_its_job_wins_also_over_earlier_attempts() -> None:
    table = AttemptTable(VirtualClock())
    table.abort(AttemptKey(R, 2, 0), 10)
    assert table.verdict(AttemptKey(R, 1, 0)) == "aborted"
    assert table.verdict(AttemptKey(R, 2, 0)) == "aborted"
    assert table.verdict(AttemptKey(R, 3, 0)) == "new"
    assert table.verdict(AttemptKey(R, 2, 1)) == "new"


def test_a_repeat_is_known_until_the_deadline() -> None:
    clock = VirtualClock()
    table = AttemptTable(clock)
    key = AttemptKey(R, 1, 0)
    assert table.verdict(key) == "new"
    table.remember(key, 5)
    assert table.verdict(key) == "known"
    clock.advance(5)
    assert table.verdict(key) == "new"


def test_an_older_abort_does_not_shorten_a_newer_one() -> None:
    clock = VirtualClock()
    table = AttemptTable(clock)
    table.abort(AttemptKey(R, 3, 0), 10)
    table.abort(AttemptKey(R, 1, 0), 1)
    clock.advance(2)
    assert table.verdict(AttemptKey(R, 3, 0)) == "aborted"


def test_memory_is_bounded() -> None:
    table = AttemptTable(VirtualClock(), max_remembered=2)
    for n in range(3):
        table.remember(AttemptKey(RequestId(str(n)), 1, 0), 60)
    assert [table.verdict(AttemptKey(RequestId(str(n)), 1, 0)) for n in range(3)] == [
        "new",
        "known",
        "known",
    ]
