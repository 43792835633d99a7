"""Events and snapshots of a pool's contents: small enough, in order, and together the whole truth."""

import pytest

from common.kv.block_pool import BlockPool, CacheChanges
from common.kv.event_log import CacheEventLog
from common.messages.block_hash import unpack
from tests.support.fleet import ref

NAMES = [bytes([n]) * 16 for n in range(8)]


def filled(names: list[bytes], num_blocks: int = 8) -> BlockPool:
    """A pool whose first blocks are cached under `names`, the last of them to be evicted first."""
    pool = BlockPool(num_blocks, block_size=4)
    table = pool.allocate(len(names))
    for block, name in zip(table, names, strict=True):
        pool.remember(block, name)
    pool.release(table)
    return pool


def test_changes_are_told_once_and_in_order() -> None:
    pool = filled(NAMES[:3])
    assert pool.take_changes() == CacheChanges(stored=tuple(NAMES[:3]))
    assert pool.take_changes() == CacheChanges()
    pool.allocate(7)
    assert pool.take_changes() == CacheChanges(evicted=(NAMES[2], NAMES[1]))
    assert pool.contents() == (NAMES[0],)


def test_what_came_and_went_unseen_is_not_told() -> None:
    pool = filled(NAMES[:2])
    pool.release(pool.allocate(8))
    assert pool.take_changes() == CacheChanges()
    pool = filled(NAMES[:1])
    pool.take_changes()
    table = pool.allocate(8)
    pool.remember(table[0], NAMES[0])
    assert pool.take_changes() == CacheChanges()


def test_a_name_that_a_block_has_already_is_no_change() -> None:
    pool = filled(NAMES[:1])
    pool.take_changes()
    table = pool.allocate(1)
    pool.remember(table[0], NAMES[0])
    assert pool.take_changes() == CacheChanges()


def test_nothing_new_makes_no_event() -> None:
    log = CacheEventLog(BlockPool(2, block_size=4), ref("d1"))
    assert log.events(8) == []
    assert log.last == 0


def test_events_are_numbered_from_one() -> None:
    pool = filled(NAMES[:2])
    log = CacheEventLog(pool, ref("d1"))
    first = log.events(8)
    pool.remember(pool.allocate(1)[0], NAMES[5])
    second = log.events(8)
    assert [event.sequence for event in first + second] == [1, 2]
    assert unpack(first[0].stored) == NAMES[:2]
    assert (log.last, first[0].ref) == (2, ref("d1"))


@pytest.mark.parametrize(("max_hashes", "sizes"), [(8, [(2, 4)]), (5, [(2, 0), (0, 4)]), (1, None)])
def test_many_changes_are_cut_and_the_evicted_come_first(
    max_hashes: int, sizes: list[tuple[int, int]] | None
) -> None:
    pool = filled(NAMES[:2], num_blocks=4)
    log = CacheEventLog(pool, ref("d1"))
    log.events(8)
    for block, name in zip(pool.allocate(4), NAMES[4:], strict=True):
        pool.remember(block, name)
    events = log.events(max_hashes)
    got = [(len(unpack(event.evicted)), len(unpack(event.stored))) for event in events]
    assert got == (sizes or [(1, 0)] * 2 + [(0, 1)] * 4)
    assert [event.sequence for event in events] == list(range(2, 2 + len(events)))


def test_a_snapshot_is_the_state_after_the_last_event_in_parts() -> None:
    pool = filled(NAMES[:5])
    log = CacheEventLog(pool, ref("d1"))
    log.events(8)
    parts = log.snapshot(2)
    assert [(one.part, one.parts, one.sequence, one.number) for one in parts] == [
        (0, 3, 1, 1),
        (1, 3, 1, 1),
        (2, 3, 1, 1),
    ]
    assert [name for one in parts for name in unpack(one.stored)] == NAMES[:5]
    assert log.snapshot(8)[0].number == 2


def test_a_snapshot_of_nothing_is_one_empty_part() -> None:
    (part,) = CacheEventLog(BlockPool(2, block_size=4), ref("d1")).snapshot(2)
    assert (part.stored, part.part, part.parts, part.sequence) == ("", 0, 1, 0)
