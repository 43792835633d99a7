"""One side of the UCX self-test: `python -m common.transport.ucx_probe serve|pull OPTIONS [ADDRESS]`.

Moves what a 512-token prompt of the default model weighs, 32 blocks in flight, a few times, and prints one
line starting with `probe`: the address, or the best rate and the transport. Run by ucx_selftest.py.
"""

import asyncio
import os
import sys
import time

import orjson
import uvloop

from common.transport.kv import KVEndpoint
from common.transport.ucx import UcxTransport
from common.transport.ucx_selftest import PROBE_S, UcxOptions

BLOCK_BYTES = 368_640
BLOCKS = 32
ROUNDS = 25


async def serve(options: UcxOptions) -> None:
    transport = UcxTransport(options, "127.0.0.1")
    # Memory that was never written is one and the same page of zeros, which costs nothing to read.
    pool = [os.urandom(BLOCK_BYTES) for _ in range(BLOCKS)]
    gone = asyncio.Event()

    async def answer(endpoint: KVEndpoint) -> None:
        for _ in range(ROUNDS):
            await endpoint.recv(bytearray(1), 0)
            await asyncio.gather(*(endpoint.send(block, tag + 1) for tag, block in enumerate(pool)))
        await endpoint.recv(bytearray(1), 0)
        gone.set()

    await transport.listen(answer)
    _say(transport.address)
    async with asyncio.timeout(PROBE_S):
        await gone.wait()
    await transport.close()


async def pull(options: UcxOptions, address: str) -> None:
    transport = UcxTransport(options, "127.0.0.1")
    pool = [bytearray(BLOCK_BYTES) for _ in range(BLOCKS)]
    endpoint = await transport.connect(address, PROBE_S)
    seconds = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        receives = [asyncio.ensure_future(endpoint.recv(b, tag + 1)) for tag, b in enumerate(pool)]
        await endpoint.send(b"n", 0)
        await asyncio.gather(*receives)
        seconds.append(time.perf_counter() - started)
    # The best round: whatever else the machine does, models being loaded above all, only slows rounds down.
    gbps = BLOCKS * BLOCK_BYTES / min(seconds) / 1e9
    _say(orjson.dumps({"gbps": gbps, "transport": transport.name}).decode())
    await endpoint.send(b"e", 0)
    await transport.close()


def _say(text: str) -> None:
    sys.stdout.write(f"probe {text}\n")
    sys.stdout.flush()


def main() -> None:
    role, options = sys.argv[1], UcxOptions(**orjson.loads(sys.argv[2]))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as services do
        runner.run(serve(options) if role == "serve" else pull(options, sys.argv[3]))


if __name__ == "__main__":
    main()
