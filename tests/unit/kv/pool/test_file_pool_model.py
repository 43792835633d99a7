"""The file pool against a dict: any order of publishing, loading and damage, one process or two."""

import asyncio
import os
import tempfile
from pathlib import Path
from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st

from common.kv.pool import file
from common.kv.pool.directory import PAGE
from common.kv.pool.file import FilePool
from tests.support.pool_meter import CountingMeter
from tests.unit.kv.pool.test_file_pool import BLOCK_BYTES, block, buffers, name, objects

CAPACITY = 5
chains = st.lists(st.integers(0, 9), min_size=1, max_size=7, unique=True)
operations = st.lists(
    st.tuples(st.sampled_from(["publish", "load", "match", "damage"]), st.integers(0, 1), chains),
    max_size=20,
)


class Ticking:
    """Stands for the module `time`: every look is a ms later, so that the order of uses is certain."""

    def __init__(self) -> None:
        self._now = 10**18

    def time_ns(self) -> int:
        self._now += 10**6
        return self._now


class Model:
    """What a pool of CAPACITY blocks holds, the least recently used first."""

    def __init__(self) -> None:
        self.held: list[int] = []
        self.damaged: set[int] = set()

    def publish(self, chain: list[int]) -> int:
        for count, number in enumerate(chain):
            if number not in self.held:
                if len(self.held) == CAPACITY:
                    victim = next((held for held in self.held if held not in chain), None)
                    if victim is None:
                        self._use(chain[:count])
                        return count
                    self._drop(victim)
                self.held.append(number)
        self._use(chain)
        return len(chain)

    def match(self, chain: list[int]) -> int:
        return next((count for count, number in enumerate(chain) if number not in self.held), len(chain))

    def load(self, chain: list[int]) -> int:
        there = self.match(chain)
        bad = next((count for count in range(there) if chain[count] in self.damaged), None)
        if bad is not None:
            self._drop(chain[bad])
        loaded = there if bad is None else bad
        self._use(chain[:loaded])
        return loaded

    def damage(self, number: int) -> None:
        if number in self.held:
            self.damaged.add(number)

    def _use(self, chain: list[int]) -> None:
        self.held = [held for held in self.held if held not in chain] + chain[::-1]

    def _drop(self, number: int) -> None:
        self.held.remove(number)
        self.damaged.discard(number)


async def follow(path: Path, steps: list[tuple[str, int, list[int]]]) -> None:
    model = Model()
    pools = [
        await FilePool.open(path, BLOCK_BYTES, CountingMeter(), max_bytes=CAPACITY * PAGE, timeout_s=30)
        for _ in range(2)
    ]
    for operation, process, chain in steps:
        pool, names = pools[process], [name(number) for number in chain]
        if operation == "publish":
            blocks = [block(number) for number in chain]
            assert await pool.publish(names, blocks) == model.publish(chain)
        elif operation == "match":
            assert await pool.match(names) == model.match(chain)
        elif operation == "load":
            target = buffers(len(chain))
            loaded = await pool.load(names, target)
            assert loaded == model.load(chain)
            assert target[:loaded] == [block(number) for number in chain[:loaded]]
        else:
            model.damage(chain[0])
            damage(path, chain[0])
        assert [found.name for found in objects(path)] == sorted(name(number).hex() for number in model.held)
    for pool in pools:
        await pool.close()


def damage(path: Path, number: int) -> None:
    for found in objects(path):
        if found.name == name(number).hex():
            used = found.stat().st_mtime_ns
            found.write_bytes(found.read_bytes()[:-1] + b"\xff")
            os.utime(found, ns=(used, used))


@settings(max_examples=60)
@given(operations)
def test_a_pool_behaves_like_a_dict_with_a_bound(steps: list[tuple[str, int, list[int]]]) -> None:
    with tempfile.TemporaryDirectory() as scratch, patch.object(file, "time", Ticking()):
        asyncio.run(follow(Path(scratch) / "pool", steps))
