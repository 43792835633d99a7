"""Publishes or loads blocks of a file pool, without end.

`python -m tests.support.pool_load publish|load DIR SEED`

A publisher writes one byte to stdout for each object written. A loader, at SIGTERM, writes what it
counted, as JSON; `wrong` are blocks that came back with other content than their name's.
"""

import asyncio
import random
import signal
import sys
from collections import Counter
from pathlib import Path

import orjson

from common.kv.pool.file import FilePool
from tests.support.pool_meter import CountingMeter

BLOCK_BYTES = 368_640
NAMES = 120
MAX_BYTES = 40 * 372_736
PREFIX = 4


def name(number: int) -> bytes:
    return random.Random(number).randbytes(16)


def content(number: int) -> bytes:
    """Any two blocks differ everywhere, so that no mixture of them passes for one."""
    return name(number) * (BLOCK_BYTES // 16)


async def publish(pool: FilePool, draw: random.Random, meter: CountingMeter) -> None:
    told = 0
    while True:
        first = draw.randrange(NAMES - PREFIX)
        numbers = range(first, first + PREFIX)
        await pool.publish([name(n) for n in numbers], [content(n) for n in numbers])
        sys.stdout.buffer.write(b"." * (meter.events["published"] - told))
        sys.stdout.buffer.flush()
        told = meter.events["published"]


async def load(pool: FilePool, draw: random.Random, stop: asyncio.Event, counts: Counter[str]) -> None:
    targets = [bytearray(BLOCK_BYTES) for _ in range(PREFIX)]
    while not stop.is_set():
        first = draw.randrange(NAMES - PREFIX)
        loaded = await pool.load([name(n) for n in range(first, first + PREFIX)], targets)
        counts["loaded"] += loaded
        counts["wrong"] += sum(targets[i] != content(first + i) for i in range(loaded))


async def main() -> None:
    what, path, seed = sys.argv[1:]
    meter = CountingMeter()
    pool = await FilePool.open(Path(path), BLOCK_BYTES, meter, max_bytes=MAX_BYTES, timeout_s=30)
    draw = random.Random(int(seed))
    if what == "publish":
        await publish(pool, draw, meter)
    stop, counts = asyncio.Event(), Counter[str]()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    await load(pool, draw, stop, counts)
    await pool.close()
    sys.stdout.buffer.write(orjson.dumps(counts | meter.events))


if __name__ == "__main__":
    asyncio.run(main())
