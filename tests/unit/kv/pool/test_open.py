"""Pools by URL: what is wrong with one is said together with what is right."""

from pathlib import Path

import pytest

from common.errors import ConfigError
from common.kv.pool.file import FilePool
from common.kv.pool.open import open_pool
from tests.support.pool_meter import CountingMeter


async def test_a_file_url_opens_a_directory(tmp_path: Path) -> None:
    pool = await open_pool(f"file://{tmp_path}/a%20pool?max_bytes=64KiB", 1000, CountingMeter())
    assert isinstance(pool, FilePool)
    assert await pool.publish([bytes(16)], [bytes(1000)]) == 1
    await pool.close()
    assert b'"max_bytes":65536' in (tmp_path / "a pool" / "pool.json").read_bytes()


async def test_without_a_bound_a_new_pool_takes_a_share_of_the_free_space(tmp_path: Path) -> None:
    pool = await open_pool(f"file://{tmp_path}/pool", 1000, CountingMeter())
    await pool.close()
    assert b'"max_bytes"' in (tmp_path / "pool" / "pool.json").read_bytes()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("redis://localhost", "choose file:///DIRECTORY.* or mooncake://HOST:PORT"),
        ("/dev/shm/pool", "choose file:///DIRECTORY"),
        ("file://dev/shm/pool", "no absolute directory"),
        ("file:///", "no absolute directory"),
        ("file:///dev/shm/pool?size=1", "no 'size'; choose from max_bytes"),
        ("file:///dev/shm/pool?max_bytes=8GB", "like 512MiB or 8GiB"),
        ("file:///dev/shm/pool?max_bytes=0", "like 512MiB or 8GiB"),
        ("file:///dev/shm/pool?max_bytes=", "like 512MiB or 8GiB"),
        ("mooncake://", "master's host and port"),
        ("mooncake://localhost", "master's host and port"),
        ("mooncake://localhost:99999", "master's host and port"),
        ("mooncake://localhost:50051/pool", "master's host and port"),
        ("mooncake://localhost:50051?replicas=0", "one is the least"),
        ("mooncake://localhost:50051?replicas=two", "one is the least"),
        ("mooncake://localhost:50051?segment=all", "like 512MiB or 8GiB"),
        ("mooncake://localhost:50051?replica=2", "choose from metadata, segment, replicas"),
    ],
)
async def test_a_wrong_url_is_told_what_would_be_right(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        await open_pool(url, 1000, CountingMeter())
    assert caught.value.message.startswith("kv_pool: ")
