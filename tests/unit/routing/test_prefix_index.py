"""The index of who has which blocks: each event once and in order, and what is missed is noticed."""

import pytest

from common.errors import MessageInvalid
from common.ids import InstanceRef
from common.messages.block_hash import pack
from common.messages.cluster import KVEvents, KVSnapshot
from common.routing.prefix_index import MAX_EARLY, PrefixIndex
from tests.support.fleet import ref

A, B, C, D = (bytes([n]) * 16 for n in range(4))
D1, D2 = ref("d1"), ref("d2")


def event(sequence: int, stored: list[bytes], evicted: list[bytes] | None = None) -> KVEvents:
    return KVEvents(D1, sequence, pack(evicted or []), pack(stored))


def snapshot(
    sequence: int, stored: list[bytes], *, number: int = 1, part: int = 0, parts: int = 1
) -> KVSnapshot:
    return KVSnapshot(D1, number, sequence, part, parts, pack(stored))


def index(*events: KVEvents) -> PrefixIndex:
    """Knows d1 from its start, and these events of it."""
    one = PrefixIndex()
    assert not one.observe(D1, 100, 0)
    for told in events:
        one.apply(told)
    return one


def behind(one: PrefixIndex, ref: InstanceRef = D1, last_event: int = 0) -> bool:
    return one.observe(ref, 100, last_event)


def test_a_match_is_the_leading_blocks_of_each_worker() -> None:
    one = index(event(1, [A, B, D]))
    one.observe(D2, 100, 0)
    one.apply(KVEvents(D2, 1, stored=pack([A, B, C])))
    assert one.match([A, B, C, D]) == {D1: 2, D2: 3}
    assert one.match([C]) == {D2: 1}
    assert one.match([]) == {}
    assert (one.num_blocks(D1), one.total_blocks) == (3, 6)


def test_evicted_blocks_are_forgotten() -> None:
    one = index(event(1, [A, B]), event(2, [C], [B]))
    assert one.match([A, B]) == {D1: 1}
    assert one.match([C]) == {D1: 1}


def test_events_of_an_unknown_worker_wait_for_its_beat_and_a_snapshot() -> None:
    one = PrefixIndex()
    one.apply(event(1, [A]))
    assert one.match([A]) == {}
    assert behind(one, last_event=1)
    one.install(snapshot(1, [A]))
    assert not behind(one, last_event=1)
    assert one.match([A]) == {D1: 1}


def test_a_gap_is_seen_by_the_next_event_or_the_next_beat() -> None:
    one = index(event(1, [A]))
    one.apply(event(3, [C]))
    assert behind(one)
    one = index(event(1, [A]))
    assert not behind(one, last_event=1)
    assert behind(one, last_event=2)


def test_what_was_known_is_still_believed_while_something_is_missing() -> None:
    one = index(event(1, [A]), event(3, [C]))
    assert one.match([A]) == {D1: 1}
    assert one.match([C]) == {}


def test_a_late_event_closes_the_gap() -> None:
    one = index(event(1, [A]), event(3, [C], [B]), event(2, [B]))
    assert not behind(one, last_event=3)
    assert one.match([A]) == one.match([C]) == {D1: 1}
    assert one.match([B]) == {}


def test_newer_events_are_applied_on_top_of_a_snapshot() -> None:
    one = index(event(3, [C], [A]), event(4, [D]))
    one.install(snapshot(2, [A, B]))
    assert not behind(one, last_event=4)
    assert [one.match([name]) for name in (A, B, C, D)] == [{}, {D1: 1}, {D1: 1}, {D1: 1}]


def test_a_snapshot_between_two_gaps_repairs_the_first() -> None:
    one = index(event(3, [C]), event(5, [D]))
    one.install(snapshot(2, [A]))
    assert behind(one)
    assert (one.match([C]), one.match([D])) == ({D1: 1}, {})


def test_a_snapshot_that_is_older_than_what_is_known_changes_nothing() -> None:
    one = index(event(1, [A]), event(2, [B]))
    one.install(snapshot(1, [C]))
    assert one.match([B]) == {D1: 1}
    assert behind(one, last_event=3)
    one.install(snapshot(1, [C]))
    assert one.match([B]) == {D1: 1}


def test_a_snapshot_counts_when_all_its_parts_are_there() -> None:
    one = index()
    assert behind(one, last_event=5)
    one.install(snapshot(5, [B], part=1, parts=2))
    assert behind(one)
    one.install(snapshot(5, [A], part=0, parts=2))
    assert not behind(one)
    assert one.match([A, B]) == {D1: 2}


def test_parts_of_two_snapshots_are_never_put_together() -> None:
    one = index()
    assert behind(one, last_event=5)
    one.install(snapshot(5, [A], number=1, part=0, parts=2))
    one.install(snapshot(5, [A], number=2, part=1, parts=2))
    assert behind(one)
    one.install(snapshot(5, [B], number=2, part=0, parts=2))
    assert not behind(one)
    assert one.num_blocks(D1) == 2


def test_events_that_come_twice_count_once() -> None:
    one = index(event(1, [A]), event(2, [], [A]), event(1, [A]))
    assert one.match([A]) == {}
    assert not behind(one)


def test_death_and_a_new_incarnation_forget_everything() -> None:
    one = index(event(1, [A]))
    one.drop(ref("d1", "another"))
    assert one.match([A]) == {D1: 1}
    one.drop(D1)
    assert one.match([A]) == {}
    one = index(event(1, [A]))
    assert not one.observe(ref("d1", "i2"), 100, 0)
    assert one.match([A]) == {}
    one.apply(event(2, [B]))
    assert one.total_blocks == 0
    one.apply(KVEvents(ref("d1", "i2"), 1, stored=pack([B])))
    assert one.match([B]) == {ref("d1", "i2"): 1}


def test_names_that_are_none_make_the_event_a_lost_one() -> None:
    one = index()
    with pytest.raises(MessageInvalid):
        one.apply(KVEvents(D1, 1, stored="no hex"))
    assert behind(one)
    one.apply(event(2, [B]))
    one.install(snapshot(1, [A]))
    assert not behind(one)
    assert one.match([A]) == one.match([B]) == {D1: 1}


def test_memory_is_bounded_by_the_workers_pools() -> None:
    one = PrefixIndex()
    one.observe(D1, 2, 0)
    one.apply(event(1, [A, B, C]))
    assert one.num_blocks(D1) == 0
    one.observe(D1, 2, 9)
    one.install(snapshot(9, [A, B, C]))
    assert one.num_blocks(D1) == 0
    for sequence in range(11, 20 + 2 * MAX_EARLY):
        one.apply(event(sequence, [A]))
    one.install(snapshot(10, [B]))
    assert one.num_blocks(D1) == 2
    assert one.observe(D1, 2, 0)
