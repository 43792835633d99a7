"""Exporters and importers over the in-process transport, with pools that see every misuse of a block."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import wraps
from typing import Any

from common.clock import LoopClock
from common.ids import (
    AttemptKey,
    BlockId,
    Incarnation,
    InstanceId,
    InstanceRef,
    LeaseId,
    RequestId,
    SystemIds,
)
from common.kv.exporter import KVExporter
from common.kv.importer import KVImporter
from common.kv.layout import KVLayout
from common.kv.wire import FinalResult, FirstToken
from common.messages.generation import SamplingParams
from common.messages.handoff import KVHandoff, LeaseGrant
from common.transport.inproc import InprocHub, InprocTransport
from common.transport.kv import Buffer, KVEndpoint, OnEndpoint
from tests.support.virtual_loop import run_virtual

LAYOUT = KVLayout(kv_heads=2, num_layers=3, block_size=16, head_dim=64, dtype="bfloat16")
"""24,576 bytes a block: large enough to be sent without buffering."""
FINGERPRINT = "layout-and-weights"
SECRET = b"secret"
KV_TIMEOUT_S = 10.0
FINAL = FinalResult((FirstToken(0, 42),))


def virtual(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test's coroutine in virtual time."""

    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        run_virtual(test(*args, **kwargs))

    return run


def key(number: int = 1) -> AttemptKey:
    return AttemptKey(RequestId(f"r{number}"), 1, 0)


def ref(name: str, incarnation: str = "1") -> InstanceRef:
    return InstanceRef(InstanceId(name), Incarnation(incarnation))


class BytePool:
    """A KVBuffer of plain bytes; counts what was released."""

    def __init__(self, num_blocks: int, fill: int = 0) -> None:
        self._blocks = [bytearray([fill]) * LAYOUT.block_bytes for _ in range(num_blocks)]
        self.released: list[BlockId] = []

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    @property
    def block_bytes(self) -> int:
        return LAYOUT.block_bytes

    def block(self, block: BlockId) -> Buffer:
        return self._blocks[block]

    def write(self, blocks: Sequence[BlockId], first: int = 1) -> None:
        """Give each of `blocks` a value of its own."""
        for number, block in enumerate(blocks):
            self._blocks[block][:] = bytes([(first + number) % 256]) * LAYOUT.block_bytes

    def content(self, blocks: Sequence[BlockId]) -> list[bytes]:
        return [bytes(self._blocks[block]) for block in blocks]

    def release(self, blocks: Sequence[BlockId]) -> None:
        assert not set(blocks) & set(self.released), "released twice"
        self.released.extend(blocks)


class GatedEndpoint:
    """Passes everything on, but a DATA send waits until `may_send` lets it."""

    def __init__(self, inner: KVEndpoint, may_send: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._inner = inner
        self._may_send = may_send
        self._closed = asyncio.Event()

    @property
    def alive(self) -> bool:
        return self._inner.alive

    async def send(self, buffer: Buffer, tag: int) -> None:
        if tag and memoryview(buffer).nbytes:  # type: ignore[arg-type]
            waits = [asyncio.ensure_future(self._may_send()), asyncio.ensure_future(self._closed.wait())]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
        await self._inner.send(buffer, tag)

    async def recv(self, buffer: Buffer, tag: int) -> None:
        await self._inner.recv(buffer, tag)

    async def close(self) -> None:
        await self._inner.close()
        self._closed.set()


class Prefill:
    """An exporter with its transport. `hold_sends_from` stops DATA sends from that one on (1 = the first)."""

    def __init__(self, hub: InprocHub, num_blocks: int = 128) -> None:
        self.transport: InprocTransport = hub.transport()
        self.pool = BytePool(num_blocks)
        self.me = ref("prefill")
        self.clock = LoopClock(asyncio.get_running_loop())
        self.hold_sends_from = 0
        self.num_sends = 0
        self.sends_go_on = asyncio.Event()
        self.send_held = asyncio.Event()
        self.exporter = KVExporter(
            transport=self.transport,
            buffer=self.pool,
            layout=LAYOUT,
            fingerprint=FINGERPRINT,
            me=self.me,
            clock=self.clock,
            ids=SystemIds(),
            secret=SECRET,
            release=self.pool.release,
            kv_timeout_s=KV_TIMEOUT_S,
        )

    async def listen(self) -> None:
        serve: OnEndpoint = self._serve
        await self.transport.listen(serve)

    async def _serve(self, endpoint: KVEndpoint) -> None:
        await self.exporter.serve(GatedEndpoint(endpoint, self._may_send))

    async def _may_send(self) -> None:
        self.num_sends += 1
        if self.hold_sends_from and self.num_sends >= self.hold_sends_from:
            self.send_held.set()
            await self.sends_go_on.wait()

    def lease(
        self,
        blocks: Sequence[BlockId],
        *,
        number: int = 1,
        num_ready: int | None = None,
        life_s: float = 600.0,
    ) -> LeaseId:
        """A lease of full blocks, complete unless `num_ready` tokens are named."""
        num_tokens = len(blocks) * LAYOUT.block_size
        ready = num_tokens if num_ready is None else num_ready
        self.pool.write(blocks)
        return self.exporter.start(key(number), blocks, num_tokens, self.clock.now() + life_s, ready)

    def handoff(self, grant: LeaseGrant, num_blocks: int, time_left_s: float = 600.0) -> KVHandoff:
        return KVHandoff(
            key=key(),
            gateway=InstanceId("gateway"),
            prefill=self.me,
            grant=grant,
            sources=(self.exporter.source,),
            fingerprint=FINGERPRINT,
            prompt_ids=tuple(range(num_blocks * LAYOUT.block_size)),
            output_ids=(),
            sampling=SamplingParams(max_tokens=8, seed=1),
            time_left_s=time_left_s,
            age_s=0.0,
        )


class Decode:
    """An importer with its transport."""

    def __init__(self, hub: InprocHub, name: str = "decode", num_blocks: int = 128) -> None:
        self.transport = hub.transport()
        self.pool = BytePool(num_blocks, fill=255)
        self.me = ref(name)
        self.importer = KVImporter(
            transport=self.transport,
            buffer=self.pool,
            layout=LAYOUT,
            fingerprint=FINGERPRINT,
            me=self.me,
            clock=LoopClock(asyncio.get_running_loop()),
            kv_timeout_s=KV_TIMEOUT_S,
            release=self.pool.release,
        )


class Pair:
    """One of each on one hub; what they hold at the end is checked by `running`."""

    def __init__(self, delay_s: Callable[[int], float]) -> None:
        self.hub = InprocHub(delay_s)
        self.prefill = Prefill(self.hub)
        self.decode = Decode(self.hub)

    def granted(self, lease: LeaseId, num_blocks: int, **changes: Any) -> KVHandoff:
        """The handoff of `lease` to our decode."""
        grant = self.prefill.exporter.bind(lease, self.decode.me)
        return replace(self.prefill.handoff(grant, num_blocks), **changes)


@asynccontextmanager
async def running(delay_s: Callable[[int], float] = lambda _nbytes: 0.001) -> AsyncIterator[Pair]:
    """A pair that serves; at the end both are closed and no lease, read or quarantined block is left."""
    pair = Pair(delay_s)
    await pair.prefill.listen()
    expiring = asyncio.create_task(pair.prefill.exporter.run())
    try:
        yield pair
    finally:
        await pair.decode.importer.close()
        await pair.prefill.exporter.close()
        expiring.cancel()
        await asyncio.gather(expiring, return_exceptions=True)
        await pair.decode.transport.close()
        await pair.prefill.transport.close()
    assert len(pair.prefill.exporter.table) == 0
    assert pair.decode.importer.num_quarantined == 0
