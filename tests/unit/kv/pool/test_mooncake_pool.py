"""The Mooncake pool over a stand-in for the store, with the answers that the real one was seen to give.

`make test-mooncake` runs it over the real one.
"""

import ctypes
import socket
import sys
from types import ModuleType
from typing import cast

import pytest

from common.errors import ConfigError, KVPoolUnavailable
from common.kv.pool.mooncake import MooncakeOptions, MooncakePool
from tests.support.pool_meter import CountingMeter

BLOCK_BYTES = 6 * 2**20
"""Two of them fill the staging memory, so that a few blocks take several calls."""
NOT_FOUND, TRANSFER_FAILED, RPC_FAILED, NO_SPACE = -704, -800, -900, -200


class FakeMaster:
    """Holds all objects. `error` answers every call from then on, as a lost master does."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.capacity = 100
        self.error = 0
        self.listening = True
        self.setup_result = 0
        self.clients: list[tuple[object, ...]] = []
        self.closed = 0

    def connect(self, address: tuple[str, int], timeout: float) -> socket.socket:
        if not self.listening:
            raise ConnectionRefusedError(111, "Connection refused")
        return cast(socket.socket, _Closable())


class _Closable:
    def close(self) -> None:
        """Nothing was opened."""


class FakeStore:
    """A client of the master of this test."""

    def __init__(self, master: FakeMaster) -> None:
        self._master = master

    def setup(self, *arguments: object) -> int:
        self._master.clients.append(arguments)
        return self._master.setup_result

    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        return 0

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        return [self._master.error or int(key in self._master.objects) for key in keys]

    def batch_get_into(self, keys: list[str], places: list[int], sizes: list[int]) -> list[int]:
        return [self._get(*item) for item in zip(keys, places, sizes, strict=True)]

    def batch_put_from(
        self, keys: list[str], places: list[int], sizes: list[int], config: "FakeConfig"
    ) -> list[int]:
        assert config.replica_num == 2
        return [self._put(*item) for item in zip(keys, places, sizes, strict=True)]

    def remove(self, key: str, force: bool) -> int:
        return NOT_FOUND if self._master.objects.pop(key, None) is None else 0

    def close(self) -> int:
        self._master.closed += 1
        return 0

    def _get(self, key: str, place: int, size: int) -> int:
        content = self._master.objects.get(key)
        if self._master.error or content is None:
            return self._master.error or NOT_FOUND
        assert len(content) <= size
        ctypes.memmove(place, content, len(content))
        return len(content)

    def _put(self, key: str, place: int, size: int) -> int:
        if self._master.error:
            return self._master.error
        if len(self._master.objects) >= self._master.capacity:
            return NO_SPACE
        self._master.objects[key] = ctypes.string_at(place, size)
        return 0


class FakeConfig:
    replica_num = 1


@pytest.fixture
def master(monkeypatch: pytest.MonkeyPatch) -> FakeMaster:
    fake = FakeMaster()
    module = ModuleType("mooncake.store")
    module.__dict__.update(MooncakeDistributedStore=lambda: FakeStore(fake), ReplicateConfig=FakeConfig)
    monkeypatch.setitem(sys.modules, "mooncake", ModuleType("mooncake"))
    monkeypatch.setitem(sys.modules, "mooncake.store", module)
    monkeypatch.setattr(socket, "create_connection", fake.connect)
    return fake


def make_pool(meter: CountingMeter | None = None) -> MooncakePool:
    options = MooncakeOptions("master", 50051, "10.0.0.7", segment_bytes=4096, replicas=2)
    return MooncakePool(options, BLOCK_BYTES, meter or CountingMeter(), timeout_s=10)


def names(*numbers: int) -> list[bytes]:
    return [bytes([number]) * 16 for number in numbers]


def blocks(*numbers: int) -> list[bytes]:
    return [bytes([number]) * BLOCK_BYTES for number in numbers]


def buffers(count: int) -> list[bytearray]:
    return [bytearray(BLOCK_BYTES) for _ in range(count)]


async def test_what_one_publishes_another_loads(master: FakeMaster) -> None:
    meter = CountingMeter()
    one, other = make_pool(), make_pool(meter)
    assert await one.publish(names(1, 2, 3, 4, 5), blocks(1, 2, 3, 4, 5)) == 5
    assert await other.match(names(1, 2, 3, 4, 5, 6)) == 5
    target = buffers(6)
    assert await other.load(names(1, 2, 3, 4, 5, 6), target) == 5
    assert target[:5] == blocks(1, 2, 3, 4, 5)
    assert {event: count for event, count in meter.events.items() if count} == {
        "matched": 5,
        "unmatched": 1,
        "hit": 5,
        "miss": 1,
    }
    setting = ("10.0.0.7", "P2PHANDSHAKE", 4096, 2**20, "tcp", "", "master:50051")
    assert master.clients == [setting, setting]
    await one.close()
    await other.close()
    assert master.closed == 2


async def test_only_what_is_absent_is_put(master: FakeMaster) -> None:
    meter = CountingMeter()
    pool = make_pool(meter)
    await pool.publish(names(1, 3), blocks(1, 3))
    assert await pool.publish(names(1, 2, 3, 4), blocks(1, 2, 3, 4)) == 4
    assert meter.events["published"] == 4
    target = buffers(4)
    assert await pool.load(names(1, 2, 3, 4), target) == 4
    assert target == blocks(1, 2, 3, 4)


async def test_a_gap_ends_what_is_matched_and_loaded(master: FakeMaster) -> None:
    pool = make_pool()
    await pool.publish(names(1, 3), blocks(1, 3))
    assert await pool.match(names(1, 2, 3)) == 1
    assert await pool.load(names(1, 2, 3), buffers(3)) == 1
    assert await pool.match([]) == await pool.load([], []) == await pool.publish([], []) == 0


@pytest.mark.parametrize("cut", [0, 1])
async def test_a_damaged_object_is_refused_counted_and_removed(master: FakeMaster, cut: int) -> None:
    meter = CountingMeter()
    pool = make_pool(meter)
    await pool.publish(names(1, 2), blocks(1, 2))
    key = next(key for key in master.objects if names(2)[0].hex() in key)
    master.objects[key] = master.objects[key][: -1 - cut] + b"\xff" * (1 - cut)
    assert await pool.load(names(1, 2), buffers(2)) == 1
    assert meter.events["corrupt"] == 1
    assert key not in master.objects


async def test_a_full_pool_keeps_the_beginning_of_a_prefix(master: FakeMaster) -> None:
    meter = CountingMeter()
    master.capacity = 3
    pool = make_pool(meter)
    assert await pool.publish(names(1, 2, 3, 4), blocks(1, 2, 3, 4)) == 3
    assert (meter.events["published"], meter.events["refused"]) == (3, 1)


async def test_a_lost_transfer_is_a_miss_and_a_lost_master_is_unavailable(master: FakeMaster) -> None:
    meter = CountingMeter()
    pool = make_pool(meter)
    await pool.publish(names(1), blocks(1))
    master.error = TRANSFER_FAILED
    assert await pool.load(names(1), buffers(1)) == 0
    assert await pool.publish(names(2), blocks(2)) == 0
    master.error = RPC_FAILED
    with pytest.raises(KVPoolUnavailable, match="master does not answer: error -900"):
        await pool.match(names(1))
    with pytest.raises(KVPoolUnavailable):
        await pool.load(names(1), buffers(1))
    with pytest.raises(KVPoolUnavailable):
        await pool.publish(names(2), blocks(2))
    assert meter.events["unavailable"] == 3
    master.error = 0
    assert await pool.load(names(1), buffers(1)) == 1


async def test_without_a_master_each_call_tries_again(master: FakeMaster) -> None:
    pool = make_pool()
    master.listening = False
    with pytest.raises(KVPoolUnavailable, match="refused"):
        await pool.match(names(1))
    master.listening, master.setup_result = True, -1
    with pytest.raises(KVPoolUnavailable, match="set up"):
        await pool.match(names(1))
    master.setup_result = 0
    assert await pool.match(names(1)) == 0
    assert len(master.clients) == 2
    await pool.match(names(1))
    assert len(master.clients) == 2


async def test_closing_unused_needs_no_store(master: FakeMaster) -> None:
    await make_pool().close()
    assert (master.clients, master.closed) == ([], 0)


async def test_a_store_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake", None)
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(ConfigError, match=r"pip install 'galley\[pool\]'.*libibverbs1"):
        make_pool()
