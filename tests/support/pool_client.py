"""A process that uses a KV pool as it is told: `python -m tests.support.pool_client URL`.

One command a line on stdin, `match|load|publish FIRST COUNT`, is answered with one line of JSON: what the
pool said, or why it is unavailable, and after how long. End of input closes the pool. Blocks that come
back with other content than their name's end the process.
"""

import asyncio
import sys
import time

import orjson

from common.errors import KVPoolUnavailable
from common.kv.pool.base import KVPool
from common.kv.pool.open import open_pool
from tests.support.pool_load import BLOCK_BYTES, content, name
from tests.support.pool_meter import CountingMeter


async def obey(pool: KVPool, command: str, first: int, count: int) -> int:
    numbers = range(first, first + count)
    names = [name(number) for number in numbers]
    if command == "match":
        return await pool.match(names)
    if command == "publish":
        return await pool.publish(names, [content(number) for number in numbers])
    targets = [bytearray(BLOCK_BYTES) for _ in numbers]
    loaded = await pool.load(names, targets)
    assert all(targets[i] == content(first + i) for i in range(loaded))
    return loaded


async def main() -> None:
    pool = await open_pool(sys.argv[1], BLOCK_BYTES, CountingMeter())
    while line := await asyncio.to_thread(sys.stdin.readline):
        command, first, count = line.split()
        began = time.monotonic()
        answer: int | str
        try:
            answer = await obey(pool, command, int(first), int(count))
        except KVPoolUnavailable as error:
            answer = error.message
        sys.stdout.write(orjson.dumps([answer, time.monotonic() - began]).decode() + "\n")
        sys.stdout.flush()
    await pool.close()


if __name__ == "__main__":
    asyncio.run(main())
