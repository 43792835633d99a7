"""The file pool: blocks come back as they went in, within the bound, whatever lies in the directory."""

import asyncio
import fcntl
import os
import stat
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from common.errors import ConfigError, KVPoolUnavailable
from common.kv.pool.directory import PAGE
from common.kv.pool.file import FilePool
from tests.support.pool_meter import CountingMeter

BLOCK_BYTES = PAGE - 100
"""With its header a page: so many objects fit as the bound has pages."""


def name(number: int) -> bytes:
    return number.to_bytes(16, "big")


def block(number: int) -> bytes:
    return bytes([number % 251]) * BLOCK_BYTES


def buffers(count: int) -> list[bytearray]:
    return [bytearray(BLOCK_BYTES) for _ in range(count)]


@asynccontextmanager
async def file_pool(
    path: Path, blocks: int = 8, meter: CountingMeter | None = None, timeout_s: float = 5
) -> AsyncIterator[FilePool]:
    pool = await FilePool.open(
        path, BLOCK_BYTES, meter or CountingMeter(), max_bytes=blocks * PAGE, timeout_s=timeout_s
    )
    try:
        yield pool
    finally:
        await pool.close()


async def put(pool: FilePool, *numbers: int) -> int:
    return await pool.publish([name(n) for n in numbers], [block(n) for n in numbers])


async def held(pool: FilePool, *numbers: int) -> list[int]:
    """Those of `numbers` that come back, and right."""
    found = []
    for number in numbers:
        target = buffers(1)
        if await pool.load([name(number)], target):
            assert target[0] == block(number)
            found.append(number)
    return found


def objects(path: Path) -> list[Path]:
    return sorted(file for file in path.glob("*/*") if not file.name.startswith("."))


async def test_what_one_publishes_another_loads(tmp_path: Path) -> None:
    meter = CountingMeter()
    async with file_pool(tmp_path / "pool") as one, file_pool(tmp_path / "pool", meter=meter) as other:
        assert await put(one, 1, 2, 3) == 3
        names = [name(n) for n in (1, 2, 3, 4)]
        assert await other.match(names) == 3
        target = buffers(4)
        assert await other.load(names, target) == 3
        assert target == [block(1), block(2), block(3), bytearray(BLOCK_BYTES)]
    assert meter.events == Counter(matched=3, unmatched=1, hit=3, miss=1)


async def test_a_gap_ends_what_is_matched_and_loaded(tmp_path: Path) -> None:
    async with file_pool(tmp_path / "pool") as pool:
        await put(pool, 1, 3)
        names = [name(n) for n in (1, 2, 3)]
        assert await pool.match(names) == 1
        assert await pool.load(names, buffers(3)) == 1
        assert await pool.match([]) == await pool.load([], []) == await pool.publish([], []) == 0


async def test_an_object_that_is_there_is_not_written_again(tmp_path: Path) -> None:
    meter = CountingMeter()
    async with file_pool(tmp_path / "pool", meter=meter) as pool:
        assert await put(pool, 1) == 1
        before = objects(tmp_path / "pool")[0].stat().st_ino
        assert await put(pool, 1, 2) == 2
        assert objects(tmp_path / "pool")[0].stat().st_ino == before
    assert meter.events == Counter(published=2)


async def test_what_was_not_used_for_longest_goes_first(tmp_path: Path) -> None:
    meter = CountingMeter()
    async with file_pool(tmp_path / "pool", blocks=4, meter=meter) as pool:
        for number in (1, 2, 3, 4):
            await put(pool, number)
        assert await held(pool, 1) == [1]  # used: 2 is the oldest now
        await put(pool, 3)  # published again: used as well
        assert await put(pool, 5) == 1
        assert await put(pool, 6) == 1
        assert len(objects(tmp_path / "pool")) == 4
        assert await held(pool, 1, 2, 3, 4, 5, 6) == [1, 3, 5, 6]
    assert meter.events["evicted"] == 2


async def test_the_end_of_a_prefix_goes_before_its_beginning(tmp_path: Path) -> None:
    async with file_pool(tmp_path / "pool", blocks=4) as pool:
        await put(pool, 1, 2, 3, 4)
        await put(pool, 5)
        assert await pool.match([name(n) for n in (1, 2, 3, 4)]) == 3


async def test_a_prefix_larger_than_the_pool_keeps_its_beginning(tmp_path: Path) -> None:
    meter = CountingMeter()
    async with file_pool(tmp_path / "pool", blocks=4, meter=meter) as pool:
        assert await put(pool, *range(1, 8)) == 4
        assert await pool.match([name(n) for n in range(1, 8)]) == 4
    assert meter.events["refused"] == 1


async def test_what_is_being_read_is_not_evicted(tmp_path: Path) -> None:
    async with file_pool(tmp_path / "pool", blocks=2) as pool:
        await put(pool, 1)
        await put(pool, 2)
        readers = [os.open(file, os.O_RDONLY) for file in objects(tmp_path / "pool")]
        fcntl.flock(readers[0], fcntl.LOCK_SH)
        assert await put(pool, 3) == 1
        assert await held(pool, 1, 2, 3) == [1, 3]
        fcntl.flock(readers[1], fcntl.LOCK_SH)
        leased = os.open(objects(tmp_path / "pool")[1], os.O_RDONLY)
        fcntl.flock(leased, fcntl.LOCK_SH)
        assert await put(pool, 4) == 0  # both are being read: the pool is full
        for reader in (*readers, leased):
            os.close(reader)  # as the end of the reader's process does
        assert await put(pool, 4) == 1


@pytest.mark.parametrize("damage", ["flip", "truncate", "extend", "empty", "rename", "header", "version"])
async def test_a_damaged_object_is_refused_counted_and_removed(tmp_path: Path, damage: str) -> None:
    meter = CountingMeter()
    async with file_pool(tmp_path / "pool", meter=meter) as pool:
        await put(pool, 1)
        file = objects(tmp_path / "pool")[0]
        content = bytearray(file.read_bytes())
        if damage == "flip":
            content[-1] ^= 1
        elif damage == "header":
            content[-BLOCK_BYTES - 1] ^= 1
        elif damage == "version":
            content[6] ^= 3
        elif damage == "truncate":
            del content[-1]
        elif damage == "extend":
            content.append(0)
        elif damage == "empty":
            content.clear()
        else:
            file.rename(file.with_name(name(2).hex()))
        wanted = 2 if damage == "rename" else 1
        if damage != "rename":
            file.write_bytes(content)
        assert await pool.load([name(wanted)], buffers(1)) == 0
        assert meter.events["corrupt"] == 1
        assert objects(tmp_path / "pool") == []
        assert await put(pool, wanted) == 1
        assert await held(pool, wanted) == [wanted]


async def test_what_a_killed_writer_left_is_overwritten_and_nobody_reads_it(tmp_path: Path) -> None:
    async with file_pool(tmp_path / "pool", blocks=4) as pool:
        await put(pool, 1)
        shard = objects(tmp_path / "pool")[0].parent
        (shard / ".new").write_bytes(b"half of an object")
        await put(pool, 2, 3, 4, 5)
        assert not (shard / ".new").exists()
        assert len(objects(tmp_path / "pool")) == 4


async def test_a_pool_of_many_shards_keeps_the_bound(tmp_path: Path) -> None:
    async with file_pool(tmp_path / "pool", blocks=256) as pool:
        for start in range(0, 600, 50):
            await pool.publish(
                [(n * 7919).to_bytes(16, "little") for n in range(start, start + 50)],
                [block(n) for n in range(start, start + 50)],
            )
        found = objects(tmp_path / "pool")
        assert len({file.parent for file in found}) == 4
        assert len(found) == 256


async def test_a_new_directory_is_private(tmp_path: Path) -> None:
    async with file_pool(tmp_path / "pool") as pool:
        await put(pool, 1)
        assert stat.S_IMODE((tmp_path / "pool").stat().st_mode) == 0o700
        assert stat.S_IMODE(objects(tmp_path / "pool")[0].stat().st_mode) == 0o600


@pytest.mark.parametrize("mode", [0o750, 0o701, 0o777, 0o1777])
async def test_a_directory_that_others_can_enter_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "pool").mkdir()
    (tmp_path / "pool").chmod(mode)
    with pytest.raises(ConfigError, match="mode 0700"):
        async with file_pool(tmp_path / "pool"):
            pass


async def test_a_directory_of_somebody_else_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pool").mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    with pytest.raises(ConfigError, match="must belong to the user 4242"):
        async with file_pool(tmp_path / "pool"):
            pass


async def test_what_is_no_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for path, message in (
        (tmp_path / "file", "not a directory"),
        (tmp_path / "link", "not a directory"),
        (tmp_path / "absent" / "pool", "does not exist"),
    ):
        with pytest.raises(ConfigError, match=message):
            async with file_pool(path):
                pass


async def test_the_bound_is_the_same_for_all(tmp_path: Path) -> None:
    async with file_pool(tmp_path / "pool", blocks=8):
        with pytest.raises(ConfigError, match=f"is {8 * PAGE} for all that use it, not {9 * PAGE}"):
            async with file_pool(tmp_path / "pool", blocks=9):
                pass
    adopted = await FilePool.open(
        tmp_path / "pool", BLOCK_BYTES, CountingMeter(), max_bytes=None, timeout_s=5
    )
    assert await put(adopted, *range(1, 12)) == 8
    await adopted.close()


async def test_a_bound_below_one_block_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="too small"):
        await FilePool.open(tmp_path / "pool", BLOCK_BYTES, CountingMeter(), max_bytes=PAGE - 1, timeout_s=5)
    async with file_pool(tmp_path / "pool") as pool:  # nothing was left of it
        assert await put(pool, 1) == 1


async def test_blocks_too_large_for_the_shards_of_a_pool_are_refused(tmp_path: Path) -> None:
    async with file_pool(tmp_path / "pool", blocks=256):
        pass
    with pytest.raises(ConfigError, match="a directory of its own"):
        await FilePool.open(tmp_path / "pool", 65 * PAGE, CountingMeter(), max_bytes=None, timeout_s=5)


async def test_a_pool_that_filled_the_disk_is_found_by_those_who_name_no_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with file_pool(tmp_path / "pool"):
        pass

    class Full:
        f_bavail, f_frsize = 0, PAGE

    monkeypatch.setattr(os, "fstatvfs", lambda file: Full)
    pool = await FilePool.open(tmp_path / "pool", BLOCK_BYTES, CountingMeter(), max_bytes=None, timeout_s=5)
    assert await put(pool, 1) == 1
    with pytest.raises(ConfigError, match="too small"):
        await FilePool.open(tmp_path / "new", BLOCK_BYTES, CountingMeter(), max_bytes=None, timeout_s=5)


async def test_a_pool_of_another_version_is_refused(tmp_path: Path) -> None:
    async with file_pool(tmp_path / "pool"):
        pass
    for content in (b'{"version":2,"max_bytes":32768,"shards":1}', b"{", b"[]", b'{"slots":1}'):
        (tmp_path / "pool" / "pool.json").write_bytes(content)
        with pytest.raises(ConfigError, match="another version"):
            async with file_pool(tmp_path / "pool"):
                pass


async def test_a_directory_that_vanished_is_unavailable_until_it_is_back(tmp_path: Path) -> None:
    meter = CountingMeter()
    async with file_pool(tmp_path / "pool", meter=meter) as pool:
        await put(pool, 1)
        (tmp_path / "pool").rename(tmp_path / "away")
        with pytest.raises(KVPoolUnavailable):
            await pool.match([name(1)])
        with pytest.raises(KVPoolUnavailable):
            await pool.load([name(1)], buffers(1))
        with pytest.raises(KVPoolUnavailable):
            await put(pool, 2)
        assert meter.events["unavailable"] == 3
        (tmp_path / "away").rename(tmp_path / "pool")
        assert await held(pool, 1) == [1]


async def test_a_full_disk_is_unavailable_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with file_pool(tmp_path / "pool") as pool:
        await put(pool, 1)
        write, calls = os.write, iter(range(10))

        def full(file: int, data: memoryview) -> int:
            if next(calls):
                raise OSError(28, "No space left on device")
            return write(file, data[:100])

        with monkeypatch.context() as patch:
            patch.setattr(os, "write", full)
            with pytest.raises(KVPoolUnavailable, match="No space left"):
                await put(pool, 2)
        assert not list((tmp_path / "pool").glob("*/.new"))
        assert await held(pool, 1, 2) == [1]
        assert await put(pool, 2) == 1


async def test_a_directory_that_was_emptied_goes_on_empty(tmp_path: Path) -> None:
    async with file_pool(tmp_path / "pool", blocks=4) as pool:
        await put(pool, 1)
        (tmp_path / "pool").rename(tmp_path / "away")
        (tmp_path / "pool").mkdir(mode=0o700)
        assert await held(pool, 1) == []
        assert await put(pool, *range(1, 7)) == 4


async def test_a_directory_opened_to_others_meanwhile_is_used_no_more(tmp_path: Path) -> None:
    async with file_pool(tmp_path / "pool") as pool:
        (tmp_path / "pool").chmod(0o770)
        with pytest.raises(KVPoolUnavailable, match="mode 0700"):
            await put(pool, 1)


async def test_a_writer_that_stands_still_costs_one_deadline(tmp_path: Path) -> None:
    async with file_pool(tmp_path / "pool", timeout_s=0.05) as pool, file_pool(tmp_path / "pool") as other:
        await put(pool, 1)
        lock = os.open(objects(tmp_path / "pool")[0].parent / ".lock", os.O_RDWR)
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(KVPoolUnavailable, match=r"within 0\.05 s"):
            await put(pool, 2)
        assert await held(other, 1) == [1]  # readers need no lock
        os.close(lock)
        assert await put(other, 2) == 1


async def test_a_cancelled_call_leaves_the_callers_memory_alone(tmp_path: Path) -> None:
    async with file_pool(tmp_path / "pool") as pool:
        await put(pool, *range(1, 9))
        target = buffers(8)
        loading = asyncio.create_task(pool.load([name(n) for n in range(1, 9)], target))
        await asyncio.sleep(0)
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading
        before = [bytes(buffer) for buffer in target]
        await pool.close()  # its thread has ended
        assert [bytes(buffer) for buffer in target] == before


async def test_a_block_of_another_size_is_a_mistake(tmp_path: Path) -> None:
    async with file_pool(tmp_path / "pool") as pool:
        with pytest.raises(ValueError, match=f"have {BLOCK_BYTES} bytes"):
            await pool.publish([name(1)], [b"short"])


async def test_a_closed_pool_says_so(tmp_path: Path) -> None:
    async with file_pool(tmp_path / "pool") as pool:
        pass
    with pytest.raises(KVPoolUnavailable, match="closed"):
        await pool.match([name(1)])
