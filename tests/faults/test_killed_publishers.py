"""kill -9 while publishing into a file pool: nobody reads a bad object, and the bound holds."""

import fcntl
import os
import random
import selectors
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import orjson

from common.kv.pool.directory import pages
from tests.support.pool_load import MAX_BYTES

ROOT = Path(__file__).resolve().parents[2]
PUBLISHES = 1000
KILLS = 20
PUBLISHERS = 3
READERS = 2


def start(what: str, pool: Path, seed: int) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "tests.support.pool_load", what, str(pool), str(seed)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)


def bytes_held(pool: Path) -> int:
    """All but the locks, while nobody may write: what is evicted and what is written would both count."""
    held = 0
    for shard in pool.glob("????"):
        with (shard / ".lock").open("rb+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            held += sum(pages(file.stat().st_size) for file in shard.iterdir() if file.name != ".lock")
    return held


def publish_and_kill(pool: Path, draw: random.Random) -> tuple[int, int]:
    """PUBLISHERS at a time write objects, each killed after some. How many were written, how many killed."""
    published = kills = started = 0
    with selectors.DefaultSelector() as selector:
        left: dict[subprocess.Popen[bytes], int] = {}
        while published < PUBLISHES or kills < KILLS:
            while len(left) < PUBLISHERS:
                child = start("publish", pool, started)
                assert child.stdout is not None
                selector.register(child.stdout, selectors.EVENT_READ, child)
                left[child] = draw.randrange(4, 3 * PUBLISHES // KILLS)
                started += 1
            for key, _ in selector.select(timeout=10):
                child = key.data
                told = len(os.read(key.fd, 4096))
                assert told, "a publisher died by itself"
                published += told
                left[child] -= told
                if left[child] <= 0:
                    selector.unregister(key.fileobj)
                    end(child)
                    del left[child]
                    kills += 1
            assert bytes_held(pool) <= MAX_BYTES
        for child in left:
            end(child)
    return published, kills


def end(child: "subprocess.Popen[bytes]") -> None:
    child.kill()
    child.wait(10)
    assert child.stdout is not None
    child.stdout.close()


def test_killed_publishers_leave_no_bad_object_and_keep_the_bound(tmp_path: Path) -> None:
    pool = tmp_path / "pool"
    readers = [start("load", pool, seed) for seed in range(READERS)]
    try:
        for reader in readers:
            assert reader.stdout is not None
            assert reader.stdout.readline() == b"ready\n"
        published, kills = publish_and_kill(pool, random.Random(5))
        for reader in readers:
            reader.send_signal(signal.SIGTERM)
        counts = [Counter(orjson.loads(reader.communicate(timeout=10)[0])) for reader in readers]
    finally:
        for reader in readers:
            reader.kill()
            reader.communicate()
    assert published >= PUBLISHES
    assert kills >= KILLS
    for count in counts:
        assert count["loaded"] > 100
        assert count["wrong"] == 0
        assert count["corrupt"] == 0  # what is there is whole; no checksum had to say otherwise
    assert bytes_held(pool) <= MAX_BYTES


def test_death_before_any_line_leaves_the_pool_whole(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.support.pool_crash", str(tmp_path / "pool")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) > 50
