"""The KV pull over real UCX between two processes: content, death, fences, and that the loop stays free."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from common.clock import SystemClock
from common.config import DecodeSettings, UcxSettings
from common.errors import ConfigError, KVPeerLost, KVTransferError
from common.ids import BlockId
from common.kv.importer import KVImporter
from common.messages import codec
from common.messages.handoff import KVHandoff
from common.observability.metrics import WorkerMetrics
from common.transport.kv import KVEndpoint
from common.transport.ucx import UcxTransport, open_ucx
from common.transport.ucx_selftest import UcxOptions, candidates, probe
from tests.support.kv_pair import FINGERPRINT
from tests.support.ucx_exporter import LAYOUT, NUM_BLOCKS, READER, ArrayPool

EAGER = UcxOptions(tls="sm,tcp", rndv_thresh="inf")
TCP = UcxOptions(tls="tcp")
ALL = [EAGER, UcxOptions(tls="sm,tcp", rndv_scheme="get_zcopy"), TCP]
BLOCKS = [BlockId(number) for number in range(32)]


class Exporter:
    """tests/support/ucx_exporter.py as a child."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            if line.startswith(b"# "):
                message: dict[str, Any] = orjson.loads(line[2:])
                return message
        raise AssertionError("the exporter ended")

    async def lease(self, blocks: int, *, ready: int = 0, finish: bool = True) -> tuple[KVHandoff, str]:
        """A handoff, and the digest of what it should bring."""
        assert self.process.stdin is not None
        self.process.stdin.write(orjson.dumps({"lease": blocks, "ready": ready, "finish": finish}) + b"\n")
        answer = await self.answer()
        return codec.decode(answer["handoff"].encode(), KVHandoff), answer["digest"]

    async def finish(self) -> int:
        """End it in order; says how many blocks were released."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        released: int = (await self.answer())["released"]
        await self.process.wait()
        return released


@asynccontextmanager
async def exporting(options: UcxOptions) -> AsyncIterator[Exporter]:
    text = orjson.dumps(options).decode()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.support.ucx_exporter", text),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=1 << 20,
        cwd=Path(__file__).parents[2],
    )
    exporter = Exporter(process)
    try:
        await exporter.answer()
        yield exporter
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@asynccontextmanager
async def importing(
    options: UcxOptions, kv_timeout_s: float = 10.0
) -> AsyncIterator[tuple[KVImporter, ArrayPool]]:
    transport, pool = UcxTransport(options, "127.0.0.1"), ArrayPool(NUM_BLOCKS)
    clock = SystemClock()
    importer = KVImporter(
        transport=transport,
        buffer=pool,
        layout=LAYOUT,
        fingerprint=FINGERPRINT,
        me=READER,
        clock=clock,
        kv_timeout_s=kv_timeout_s,
        release=pool.release,
    )
    try:
        yield importer, pool
    finally:
        await importer.close()
        await transport.close()
        assert importer.num_quarantined == 0


async def until(condition: Callable[[], object]) -> None:
    """Wait for what nobody announces: bytes in a pool, a gauge. Pytest's timeout is the deadline."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


@asynccontextmanager
async def free_loop(most_s: float) -> AsyncIterator[None]:
    """Fails when the event loop was held for longer than `most_s` in one go."""
    longest = 0.0

    async def beat() -> None:
        nonlocal longest
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0)
            longest = max(longest, time.perf_counter() - before)
            await asyncio.sleep(0.001)

    beating = asyncio.create_task(beat())
    try:
        yield
    finally:
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)
    assert longest < most_s


@pytest.mark.parametrize("options", ALL, ids=["eager", "get", "tcp"])
async def test_every_byte_arrives_and_every_block_goes_back(options: UcxOptions) -> None:
    async with exporting(options) as exporter, importing(options) as (importer, pool):
        for _ in range(3):
            pool.array[:] = 0
            handoff, digest = await exporter.lease(32)
            result = await importer.pull(handoff, BLOCKS)
            assert pool.digest(32) == digest
            assert result.num_bytes == 512 * 23_040  # field notes: KV bytes per token of the default model
        assert result.transport == ("tcp" if options is TCP else "sm")
        assert pool.released == 0
        await importer.close()
        assert await exporter.finish() == 96


async def test_several_pulls_share_an_endpoint() -> None:
    async with exporting(EAGER) as exporter, importing(EAGER) as (importer, pool):
        handoffs = [(await exporter.lease(16))[0] for _ in range(4)]
        ranges = [[BlockId(16 * pull + index) for index in range(16)] for pull in range(4)]
        await asyncio.gather(*(importer.pull(h, b) for h, b in zip(handoffs, ranges, strict=True)))
        for pull in range(1, 4):
            assert (pool.array[16 * pull : 16 * pull + 16] == pool.array[:16]).all()


@pytest.mark.parametrize("options", ALL, ids=["eager", "get", "tcp"])
async def test_a_killed_exporter_is_noticed_and_a_new_one_serves(options: UcxOptions) -> None:
    async with importing(options) as (importer, pool):
        async with exporting(options) as exporter:
            handoff, _ = await exporter.lease(32, ready=8, finish=False)
            pulling = asyncio.create_task(importer.pull(handoff, BLOCKS))
            await until(lambda: pool.array[7].any())
            async with free_loop(0.5):
                killed = time.monotonic()
                exporter.process.kill()
                with pytest.raises(KVPeerLost):
                    await pulling
                assert time.monotonic() - killed < 2
        pool.array[:] = 0
        async with exporting(options) as exporter:
            handoff, digest = await exporter.lease(32)
            await importer.pull(handoff, BLOCKS)
            assert pool.digest(32) == digest
        assert pool.released == 32


async def test_a_stopped_exporter_times_out_and_its_blocks_come_back() -> None:
    async with importing(EAGER, kv_timeout_s=1.0) as (importer, pool), exporting(EAGER) as exporter:
        handoff, _ = await exporter.lease(32, ready=8, finish=False)
        pulling = asyncio.create_task(importer.pull(handoff, BLOCKS))
        await until(lambda: pool.array[7].any())
        os.kill(exporter.process.pid, signal.SIGSTOP)
        async with free_loop(0.5):
            with pytest.raises(KVTransferError):
                await pulling
            assert importer.num_quarantined == 32
            await until(lambda: not importer.num_quarantined)
        assert pool.released == 32
        before = pool.digest(32)
        os.kill(exporter.process.pid, signal.SIGCONT)
        handoff, _ = await exporter.lease(8)
        await importer.pull(handoff, [BlockId(40 + index) for index in range(8)])
        assert pool.digest(32) == before


async def test_nobody_there_is_told_at_once() -> None:
    transport = UcxTransport(TCP, "127.0.0.1")
    try:
        with pytest.raises(KVPeerLost):
            await transport.connect("127.0.0.1:9", 5)
    finally:
        await transport.close()


async def test_an_idle_endpoint_costs_no_processor_time() -> None:
    """A pending receive in ucxx's own asyncio layer would be a busy loop."""
    server, client = UcxTransport(EAGER, "127.0.0.1"), UcxTransport(EAGER, "127.0.0.1")

    async def wait(endpoint: KVEndpoint) -> None:
        with pytest.raises(KVPeerLost):
            await endpoint.recv(bytearray(1), 1)

    await server.listen(wait)
    endpoint = await client.connect(server.address, 5)
    waiting = asyncio.create_task(wait(endpoint))
    await asyncio.sleep(0.2)
    before = time.process_time()
    await asyncio.sleep(0.5)
    assert time.process_time() - before < 0.1
    await endpoint.close()
    await waiting
    await client.close()
    await server.close()


async def test_the_probe_measures_this_machine() -> None:
    result = await probe(candidates(UcxSettings(tls="tcp"))[0])
    assert result is not None
    assert result.transport == "tcp"
    assert result.gbps > 0.001


async def test_impossible_settings_are_refused_by_name() -> None:
    assert await probe(UcxOptions(tls="carrier_pigeon")) is None
    with pytest.raises(ConfigError, match="progress_mode"):
        UcxTransport(UcxOptions(progress_mode="thread"), "127.0.0.1")


async def test_a_worker_opens_what_the_self_test_chose_or_refuses(tmp_path: Path) -> None:
    metrics = WorkerMetrics("decode-0", "decode")
    settings = DecodeSettings(cache_dir=tmp_path, ucx=UcxSettings(tls="tcp", rndv_thresh="inf"))
    transport = await open_ucx(settings, metrics)
    assert transport.name == "tcp"
    await transport.close()
    other = settings.model_copy(update={"require_transport": "cuda_ipc"})
    with pytest.raises(ConfigError, match="require_transport is cuda_ipc, but KV would go over tcp"):
        await open_ucx(other, metrics)
