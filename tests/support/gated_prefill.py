"""A prefill worker whose KV stops flowing at the third block: the tests' own entry point of the service.

`python -m tests.support.gated_prefill --gate=FIFO ...` is services.prefill but for its KV transport: the
third block that it would send is never sent, and a byte is written into FIFO at that moment.
"""

import asyncio
import os
import sys

from common.config import PrefillSettings, load
from common.kv.wire import CONTROL_TAG
from common.runtime.service import run_service
from common.runtime.worker_process import serve_worker
from common.transport.kv import Buffer, KVEndpoint, KVTransport, OnEndpoint
from services.prefill.service import PrefillService

HELD_BLOCK = 3


class GatedTransport:
    """A KVTransport that passes everything on, but for block number HELD_BLOCK and those behind it."""

    def __init__(self, inner: KVTransport, gate: str) -> None:
        self._inner = inner
        self._gate = gate
        self._sent = 0

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def address(self) -> str:
        return self._inner.address

    async def listen(self, on_endpoint: OnEndpoint) -> None:
        async def gated(endpoint: KVEndpoint) -> None:
            await on_endpoint(GatedEndpoint(endpoint, self))

        await self._inner.listen(gated)

    async def connect(self, address: str, timeout_s: float) -> KVEndpoint:
        return await self._inner.connect(address, timeout_s)

    async def close(self) -> None:
        await self._inner.close()

    async def pass_block(self) -> None:
        self._sent += 1
        if self._sent == HELD_BLOCK:
            with open(self._gate, "w") as gate:  # noqa: ASYNC230 (the test holds the other end open)
                gate.write("h")
        if self._sent >= HELD_BLOCK:
            await asyncio.Event().wait()  # until SIGKILL


class GatedEndpoint:
    def __init__(self, inner: KVEndpoint, transport: GatedTransport) -> None:
        self._inner = inner
        self._transport = transport

    @property
    def alive(self) -> bool:
        return self._inner.alive

    async def send(self, buffer: Buffer, tag: int) -> None:
        if tag != CONTROL_TAG:
            await self._transport.pass_block()
        await self._inner.send(buffer, tag)

    async def recv(self, buffer: Buffer, tag: int) -> None:
        await self._inner.recv(buffer, tag)

    async def close(self) -> None:
        await self._inner.close()


def main() -> None:
    gates = [argument for argument in sys.argv[1:] if argument.startswith("--gate=")]
    settings = load(PrefillSettings, [a for a in sys.argv[1:] if a not in gates])
    gate = gates[0].removeprefix("--gate=")
    assert os.path.exists(gate), gate
    run_service(
        settings,
        lambda context: serve_worker(
            settings, context, PrefillService, wrap_transport=lambda inner: GatedTransport(inner, gate)
        ),
    )


if __name__ == "__main__":
    main()
