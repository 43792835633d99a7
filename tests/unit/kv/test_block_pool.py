"""The block pool's contract: used, cached or free, and never lost."""

from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.errors import PoolExhausted
from common.ids import BlockId
from common.kv.block_pool import BlockPool
from tests.support.leaks import assert_pool_idle


def test_allocation_is_all_or_nothing() -> None:
    pool = BlockPool(3, block_size=4)
    held = pool.allocate(2)
    with pytest.raises(PoolExhausted):
        pool.allocate(2)
    assert pool.num_free == 1
    pool.release(held)
    assert_pool_idle(pool)


def test_a_shared_block_is_free_only_after_its_last_release() -> None:
    pool = BlockPool(1, block_size=4)
    held = pool.allocate(1)
    pool.retain(held)
    pool.release(held)
    assert pool.num_free == 0
    pool.release(held)
    assert pool.num_free == 1


def test_named_blocks_are_evicted_last_and_tail_first() -> None:
    pool = BlockPool(4, block_size=4)
    table = pool.allocate(3)
    for block, name in zip(table, (b"head", b"middle", b"tail"), strict=True):
        pool.remember(block, name)
    pool.release(table)
    assert (pool.num_cached, pool.num_free) == (3, 4)
    pool.allocate(2)
    assert [pool.find(name) for name in (b"head", b"middle", b"tail")] == [table[0], table[1], None]


def test_sharing_a_cached_block_takes_it_out_of_what_can_be_allocated() -> None:
    pool = BlockPool(2, block_size=4)
    first = pool.allocate(1)
    pool.remember(first[0], b"x")
    pool.release(first)
    assert not pool.can_allocate(2, sharing=first)
    with pytest.raises(PoolExhausted):
        pool.allocate(2, sharing=first)
    assert pool.find(b"x") == first[0]
    fresh = pool.allocate(1, sharing=first)
    assert set(fresh) != set(first)
    assert pool.num_used == 2


def test_misuse_is_a_bug_and_says_so() -> None:
    pool = BlockPool(2, block_size=4)
    with pytest.raises(ValueError, match="block 0"):
        pool.release([BlockId(0)])
    with pytest.raises(ValueError, match="block 1"):
        pool.retain([BlockId(1)])
    with pytest.raises(ValueError, match="not in use"):
        pool.remember(BlockId(0), b"x")


def test_listeners_hear_of_freed_blocks_only() -> None:
    pool = BlockPool(2, block_size=4)
    heard: list[int] = []
    pool.on_free(lambda: heard.append(pool.num_free))
    held = pool.allocate(2)
    pool.retain(held)
    pool.release(held)
    assert heard == []
    pool.release(held)
    assert heard == [2]


class PoolMachine(RuleBasedStateMachine):
    """Random use against a plain count of who holds what."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(6, block_size=4)
        self.held: Counter[BlockId] = Counter()
        self.names: dict[bytes, BlockId] = {}

    @rule(count=st.integers(0, 7))
    def allocate(self, count: int) -> None:
        free = self.pool.num_free
        if count > free:
            with pytest.raises(PoolExhausted):
                self.pool.allocate(count)
            return
        blocks = self.pool.allocate(count)
        assert len(set(blocks)) == count
        assert all(self.held[block] == 0 for block in blocks)
        self.held.update(blocks)
        self.names = {name: block for name, block in self.names.items() if block not in blocks}

    @precondition(lambda self: any(self.held.values()))
    @rule(data=st.data(), more=st.booleans())
    def retain_or_release(self, data: st.DataObject, more: bool) -> None:
        block = data.draw(st.sampled_from(sorted(+self.held)))
        if more:
            self.pool.retain([block])
            self.held[block] += 1
        else:
            self.pool.release([block])
            self.held[block] -= 1

    @precondition(lambda self: any(self.held.values()))
    @rule(data=st.data(), name=st.sampled_from([b"a", b"b", b"c"]))
    def remember(self, data: st.DataObject, name: bytes) -> None:
        block = data.draw(st.sampled_from(sorted(+self.held)))
        self.pool.remember(block, name)
        if name not in self.names and block not in self.names.values():
            self.names[name] = block

    @rule(name=st.sampled_from([b"a", b"b", b"c"]))
    def share_cached(self, name: bytes) -> None:
        block = self.pool.find(name)
        if block is not None:
            self.pool.retain([block])
            self.held[block] += 1

    @invariant()
    def adds_up(self) -> None:
        idle_named = {block for block in self.names.values() if self.held[block] == 0}
        assert self.pool.num_used == len(+self.held)
        assert self.pool.num_cached == len(idle_named)
        assert self.pool.num_used + self.pool.num_free == 6
        assert {name: self.pool.find(name) for name in self.names} == self.names

    def teardown(self) -> None:
        self.pool.release(list(self.held.elements()))
        assert_pool_idle(self.pool)


TestPool = PoolMachine.TestCase
