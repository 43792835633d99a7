"""One side of the UCX self-test: `python -m common.transport.ucx_probe serve|pull OPTIONS [ADDRESS]`.

Moves blocks of 16 tokens of the default model from pool to pool, each a message of its own, 32 in
flight all the time and every receive posted before its block is sent, as pulls do it. Prints one line that
starts with `probe`: the address, or the rates and the transport. Run by ucx_selftest.py and bench/transfer.
"""

import asyncio
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Callable

import orjson
import uvloop

from common.transport.kv import KVEndpoint
from common.transport.ucx import UcxTransport
from common.transport.ucx_selftest import PROBE_S, UcxOptions

BLOCK_BYTES = 368_640
IN_FLIGHT = 32
AHEAD = 2 * IN_FLIGHT
"""Receives posted: while a window of blocks is sent, the next one is asked for."""
MESSAGES = 256
ROUNDS = 9

_GO, _END = b"g", b"e"


async def serve(options: UcxOptions) -> None:
    transport = UcxTransport(options, "127.0.0.1")
    # Memory that was never written is one and the same page of zeros, which costs nothing to read.
    pool = [os.urandom(BLOCK_BYTES) for _ in range(AHEAD)]
    gone = asyncio.Event()

    async def answer(endpoint: KVEndpoint) -> None:
        order = bytearray(1)
        await endpoint.recv(order, 0)
        while order != _END:
            await _move(IN_FLIGHT, lambda i: endpoint.send(pool[i % AHEAD], 1 + i % AHEAD))
            await endpoint.recv(order, 0)
        gone.set()

    await transport.listen(answer)
    _say(transport.address)
    async with asyncio.timeout(PROBE_S):
        await gone.wait()
    await transport.close()


async def pull(options: UcxOptions, address: str) -> None:
    transport = UcxTransport(options, "127.0.0.1")
    pool = [bytearray(os.urandom(BLOCK_BYTES)) for _ in range(AHEAD)]
    endpoint = await transport.connect(address, PROBE_S)
    rates = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        await endpoint.send(_GO, 0)
        await _move(AHEAD, lambda i: endpoint.recv(pool[i % AHEAD], 1 + i % AHEAD))
        rates.append(MESSAGES * BLOCK_BYTES / (time.perf_counter() - started) / 1e9)
    # The best round: whatever else the machine does, models being loaded above all, only slows rounds down.
    found = {"gbps": max(rates), "median_gbps": statistics.median(rates), "transport": transport.name}
    _say(orjson.dumps(found).decode())
    await endpoint.send(_END, 0)
    await transport.close()


async def _move(count: int, move: Callable[[int], Awaitable[None]]) -> None:
    """Messages 0 to MESSAGES - 1, the next one as soon as one of `count` is done."""
    numbers = iter(range(MESSAGES))

    async def one_after_the_other() -> None:
        for number in numbers:
            await move(number)

    async with asyncio.TaskGroup() as group:
        for _ in range(count):
            group.create_task(one_after_the_other())


def _say(text: str) -> None:
    sys.stdout.write(f"probe {text}\n")
    sys.stdout.flush()


def main() -> None:
    role, options = sys.argv[1], UcxOptions(**orjson.loads(sys.argv[2]))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as services do
        runner.run(serve(options) if role == "serve" else pull(options, sys.argv[3]))


if __name__ == "__main__":
    main()
