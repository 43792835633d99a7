"""LeaseTable: blocks go back exactly once, never while they are read, and only the last reader reads."""

import math
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from common.clock import VirtualClock
from common.errors import KVRevoked, KVTransferError, KVUnknownLease
from common.ids import (
    AttemptKey,
    BlockId,
    Incarnation,
    InstanceId,
    InstanceRef,
    LeaseId,
    RequestId,
    SeededIds,
)
from common.kv.lease import LeaseTable
from common.kv.wire import FinalResult, FirstToken

READERS = [InstanceRef(InstanceId(f"d{i}"), Incarnation("1")) for i in range(3)]
FINAL = FinalResult((FirstToken(0, 5),))


def key(number: int) -> AttemptKey:
    return AttemptKey(RequestId(f"r{number}"), 1, 0)


class Leases(RuleBasedStateMachine):
    """Random lives against a model of three facts per lease: ended, reads in flight, generation."""

    leases: Bundle[LeaseId] = Bundle("leases")
    grants: Bundle[tuple[LeaseId, int, InstanceRef]] = Bundle("grants")
    reads: Bundle[LeaseId] = Bundle("reads")

    def __init__(self) -> None:
        super().__init__()
        self.clock = VirtualClock()
        self.released: Counter[BlockId] = Counter()
        self.gone: Counter[AttemptKey] = Counter()
        self.table = LeaseTable(self.clock, SeededIds(1), self._release, self._gone)
        self.blocks: dict[LeaseId, BlockId] = {}
        self.deadlines: dict[LeaseId, float] = {}
        self.ended: set[LeaseId] = set()
        self.reading: Counter[LeaseId] = Counter()
        self.generation: dict[LeaseId, int] = {}
        self.reader: dict[LeaseId, InstanceRef] = {}
        self.given: set[LeaseId] = set()
        self.final: set[LeaseId] = set()

    def _release(self, blocks: Sequence[BlockId]) -> None:
        self.released.update(blocks)

    def _gone(self, who: AttemptKey) -> None:
        self.gone[who] += 1

    def current(self, lease: LeaseId, generation: int) -> bool:
        return lease not in self.ended and self.generation[lease] == generation

    @rule(target=leases, wait=st.floats(0.1, 10.0))
    def open(self, wait: float) -> LeaseId:
        block = BlockId(len(self.blocks))
        lease = self.table.open(key(block), [block], 16, self.clock.now() + wait, 0)
        self.blocks[lease], self.deadlines[lease] = block, self.clock.now() + wait
        self.generation[lease] = 0
        return lease

    @rule(target=grants, lease=leases, reader=st.sampled_from(READERS))
    def bind(self, lease: LeaseId, reader: InstanceRef) -> tuple[LeaseId, int, InstanceRef]:
        if lease in self.ended:
            with pytest.raises(KVUnknownLease):
                self.table.bind(lease, reader)
        elif lease in self.given:
            with pytest.raises(KVRevoked):
                self.table.bind(lease, reader)
        else:
            self.generation[lease] += 1
            self.reader[lease] = reader
            assert self.table.bind(lease, reader) == self.generation[lease]
        return lease, self.generation[lease], reader

    @rule(target=reads, grant=grants)
    def begin_read(self, grant: tuple[LeaseId, int, InstanceRef]) -> LeaseId:
        lease, generation, _ = grant
        if self.current(lease, generation):
            self.table.begin_read(lease, generation)
            self.reading[lease] += 1
        else:
            with pytest.raises(KVTransferError):
                self.table.begin_read(lease, generation)
        return lease

    @rule(lease=consumes(reads))
    def end_read(self, lease: LeaseId) -> None:
        if self.reading[lease]:
            self.table.end_read(lease)
            self.reading[lease] -= 1

    @rule(lease=leases)
    def finish(self, lease: LeaseId) -> None:
        self.table.set_final(lease, FINAL)
        self.final.add(lease)

    @rule(grant=grants)
    def give_final(self, grant: tuple[LeaseId, int, InstanceRef]) -> None:
        lease, generation, _ = grant
        if not self.current(lease, generation):
            with pytest.raises(KVTransferError):
                self.table.give_final(lease, generation)
            return
        final = self.table.give_final(lease, generation)
        assert (final and final.choices) == (FINAL.choices if lease in self.final else None)
        if final:
            self.given.add(lease)

    @rule(grant=grants)
    def acknowledge(self, grant: tuple[LeaseId, int, InstanceRef]) -> None:
        lease, generation, _ = grant
        gone = lease in self.ended and not self.reading[lease]
        if gone:
            self.table.acknowledge(lease, generation)  # repeated: as good as done
        elif self.current(lease, generation):
            self.table.acknowledge(lease, generation)
            self.ended.add(lease)
        else:
            with pytest.raises(KVRevoked):
                self.table.acknowledge(lease, generation)

    @rule(lease=leases)
    def abort(self, lease: LeaseId) -> None:
        expected = [] if lease in self.ended else [lease]
        assert self.table.abort(key(self.blocks[lease])) == expected
        self.ended.add(lease)

    @rule(reader=st.sampled_from(READERS))
    def reader_dies(self, reader: InstanceRef) -> None:
        expected = {x for x, who in self.reader.items() if who == reader} - self.ended
        assert set(self.table.reader_dead(reader)) == expected
        self.ended |= expected

    @rule(seconds=st.floats(0.0, 5.0))
    def time_passes(self, seconds: float) -> None:
        self.clock.advance(seconds)
        now = self.clock.now()
        expected = {lease for lease, deadline in self.deadlines.items() if deadline <= now} - self.ended
        assert set(self.table.expire(now)) == expected
        self.ended |= expected

    @invariant()
    def released_once_and_only_when_ended_and_unread(self) -> None:
        for lease, block in self.blocks.items():
            due = lease in self.ended and not self.reading[lease]
            assert self.released[block] == int(due)
            assert self.gone[key(block)] == int(due)

    @invariant()
    def the_next_deadline_is_the_earliest_alive(self) -> None:
        alive = [deadline for lease, deadline in self.deadlines.items() if lease not in self.ended]
        assert self.table.next_deadline() == min(alive, default=None)

    @invariant()
    def gauges_count_what_is_held(self) -> None:
        counts = self.table.count()
        held = [x for x in self.blocks if x not in self.ended or self.reading[x]]
        assert sum(counts.values()) == len(held) == len(self.table)
        assert counts["ending"] == len([x for x in held if x in self.ended])

    def teardown(self) -> None:
        self.table.expire(math.inf)
        for lease, reads in self.reading.items():
            for _ in range(reads):
                self.table.end_read(lease)
        assert set(self.released.values()) <= {1}
        assert len(self.released) == len(self.blocks)


TestLeases = Leases.TestCase


def test_readiness_only_grows_and_stays_within_the_lease() -> None:
    table = LeaseTable(VirtualClock(), SeededIds(1), lambda _blocks: None)
    lease = table.open(key(1), [BlockId(0), BlockId(1)], 20, 10.0, 4)
    generation = table.bind(lease, READERS[0])
    table.advance(lease, 17)
    table.advance(lease, 8)
    assert table.get(lease, generation).num_ready == 17
    table.advance(lease, 99)
    assert table.get(lease, generation).num_ready == 20


def test_states_follow_the_reader() -> None:
    table = LeaseTable(VirtualClock(), SeededIds(1), lambda _blocks: None)
    lease = table.open(key(1), [BlockId(0)], 16, 10.0, 0)
    first = table.bind(lease, READERS[0])
    assert table.count() == {"waiting": 1, "reading": 0, "ending": 0}
    table.show(lease, first)
    assert table.count() == {"waiting": 0, "reading": 1, "ending": 0}
    table.bind(lease, READERS[1])
    assert table.count() == {"waiting": 1, "reading": 0, "ending": 0}


def test_final_tells_how_long_it_has_waited() -> None:
    clock = VirtualClock()
    table = LeaseTable(clock, SeededIds(1), lambda blocks: None)
    lease = table.open(key(1), [BlockId(0)], 16, 100.0, 0)
    generation = table.bind(lease, READERS[0])
    clock.advance(5)
    table.set_final(lease, FINAL)
    clock.advance(0.25)
    final = table.give_final(lease, generation)
    assert final is not None
    assert final.age_s == 0.25
