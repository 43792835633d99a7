"""Blocks that travel encoded: who decides that, what arrives, and what becomes of those who disagree."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import structlog

from common.errors import KVMismatch, KVTransferError
from common.ids import BlockId
from common.kv.codec import PLAIN, choose
from common.kv.wire import Open
from common.messages import codec
from common.messages.handoff import LeaseGrant
from tests.support.kv_codecs import MirrorCodec
from tests.support.kv_pair import FINAL, LAYOUT, Pair, ref, running, virtual

BLOCKS = [BlockId(number) for number in range(40)]
TARGET = [BlockId(number) for number in range(60, 100)]


@contextmanager
def codecs(pair: Pair, *, prefill: str = "mirror", decode: str = "mirror") -> Iterator[list[MirrorCodec]]:
    """One codec on each side, under these names."""
    ours = [MirrorCodec(pair.prefill.pool), MirrorCodec(pair.decode.pool)]
    pair.prefill.exporter.codecs = {prefill: ours[0]}
    pair.decode.importer._codecs = {decode: ours[1]}
    yield ours


@pytest.mark.parametrize(
    ("wanted", "offered", "announced", "known", "chosen"),
    [
        ("none", "none", ("fp8", "int8"), ("fp8", "int8"), "none"),
        ("fp8", "none", ("fp8", "int8"), ("fp8", "int8"), "fp8"),
        ("none", "int8", ("fp8", "int8"), ("fp8", "int8"), "int8"),
        ("fp8", "int8", ("fp8", "int8"), ("fp8", "int8"), "fp8"),  # the reader's own setting goes first
        ("fp8", "int8", ("int8",), ("fp8", "int8"), "int8"),
        ("fp8", "none", (), ("fp8", "int8"), "none"),  # an exporter that knows of none
        ("none", "fp4", ("fp4", "fp8"), ("fp8", "int8"), "none"),  # a newer exporter
        ("fp8", "fp8", ("fp8",), (), "none"),
    ],
)
def test_only_what_both_know_is_asked_for(
    wanted: str, offered: str, announced: tuple[str, ...], known: tuple[str, ...], chosen: str
) -> None:
    assert choose(wanted, offered, announced, known) == chosen


@pytest.mark.parametrize("asking", ["decode", "prefill"])
@virtual
async def test_blocks_are_encoded_where_one_side_asks_for_it(asking: str) -> None:
    async with running() as pair:
        with codecs(pair) as (encoder, decoder):
            lease = pair.prefill.lease(BLOCKS)
            pair.prefill.exporter.finish(lease, FINAL)
            if asking == "decode":
                pair.decode.importer._compression = "mirror"
            offer = "mirror" if asking == "prefill" else PLAIN
            handoff = pair.granted(lease, 40, compression=offer, compressions=("mirror",))
            result = await pair.decode.importer.pull(handoff, TARGET)
        assert pair.decode.pool.content(TARGET) == pair.prefill.pool.content(BLOCKS)
        assert (encoder.encoded, decoder.decoded) == (40, 40)
        assert result.num_bytes == 40 * (LAYOUT.block_bytes + 4)


@virtual
async def test_blocks_come_as_they_are_where_nobody_asks_or_the_exporter_announces_nothing() -> None:
    async with running() as pair:
        with codecs(pair) as (encoder, decoder):
            for number, announced in enumerate([("mirror",), ()]):
                pair.decode.importer._compression = PLAIN if announced else "mirror"
                source, target = BLOCKS[number * 20 :][:20], TARGET[number * 20 :][:20]
                lease = pair.prefill.lease(source, number=number)
                pair.prefill.exporter.finish(lease, FINAL)
                handoff = pair.granted(lease, 20, compressions=announced)
                result = await pair.decode.importer.pull(handoff, target)
                assert pair.decode.pool.content(target) == pair.prefill.pool.content(source)
                assert result.num_bytes == 20 * LAYOUT.block_bytes
        assert (encoder.encoded, decoder.decoded) == (0, 0)


@virtual
async def test_chunks_travel_encoded_while_later_ones_are_computed() -> None:
    async with running() as pair:
        with codecs(pair):
            lease = pair.prefill.lease(BLOCKS, num_ready=0)
            handoff = pair.granted(lease, 40, compression="mirror", compressions=("mirror",))
            pulling = asyncio.create_task(pair.decode.importer.pull(handoff, TARGET))
            await asyncio.sleep(1)
            pair.prefill.exporter.advance(lease, 10 * 16)
            await asyncio.sleep(1)
            assert pair.decode.pool.content(TARGET[:10]) == pair.prefill.pool.content(BLOCKS[:10])
            assert pair.decode.pool.content(TARGET[10:11]) == [b"\xff" * LAYOUT.block_bytes]
            pair.prefill.exporter.finish(lease, FINAL)
            await pulling
        assert pair.decode.pool.content(TARGET) == pair.prefill.pool.content(BLOCKS)


@virtual
async def test_a_compression_that_the_exporter_does_not_know_is_a_mismatch() -> None:
    """It was announced all the same: by a liar, or by an exporter of before a restart."""
    async with running() as pair:
        with codecs(pair, prefill="other"), structlog.testing.capture_logs() as logs:
            pair.decode.importer._compression = "mirror"
            lease = pair.prefill.lease(BLOCKS)
            handoff = pair.granted(lease, 40, compressions=("mirror",))
            with pytest.raises(KVMismatch, match="mirror"):
                await pair.decode.importer.pull(handoff, TARGET)
        assert pair.prefill.num_sends == 0
        assert [log["event"] for log in logs if log["log_level"] == "error"] == ["KV reader refused"]
        pair.prefill.exporter.abort(handoff.key)


@virtual
async def test_a_block_that_cannot_be_decoded_fails_the_pull_at_once() -> None:
    async with running() as pair:
        with codecs(pair) as (_, decoder):

            async def fails(data: object, block: BlockId) -> None:
                raise ValueError("nonsense")

            decoder.decode = fails  # type: ignore[method-assign]
            lease = pair.prefill.lease(BLOCKS)
            handoff = pair.granted(lease, 40, compression="mirror", compressions=("mirror",))
            began = asyncio.get_running_loop().time()
            with pytest.raises(KVTransferError, match="nonsense"):
                await pair.decode.importer.pull(handoff, TARGET)
            assert asyncio.get_running_loop().time() - began < 1
            await asyncio.sleep(1)
            assert sorted(pair.decode.pool.released) == TARGET
        pair.prefill.exporter.abort(handoff.key)


@virtual
async def test_blocks_of_an_aborted_pull_wait_for_what_is_being_decoded() -> None:
    async with running() as pair:
        with codecs(pair) as (_, decoder):
            decoder._delay_s = 2.0
            lease = pair.prefill.lease(BLOCKS)
            handoff = pair.granted(lease, 40, compression="mirror", compressions=("mirror",))
            pulling = asyncio.create_task(pair.decode.importer.pull(handoff, TARGET))
            await asyncio.sleep(1)
            pulling.cancel()
            await asyncio.gather(pulling, return_exceptions=True)
            assert pair.decode.importer.num_quarantined == 40
            assert pair.decode.pool.released == []
            await asyncio.sleep(3)
            assert sorted(pair.decode.pool.released) == TARGET
        pair.prefill.exporter.abort(handoff.key)


def test_an_open_of_an_older_reader_asks_for_none() -> None:
    grant = LeaseGrant("l", 1, ref("decode"), "token")  # type: ignore[arg-type]
    plain, asking = codec.encode(Open(grant, "f")), codec.encode(Open(grant, "f", "fp8"))
    assert b"compression" not in plain
    assert codec.decode(plain, Open).compression == PLAIN
    assert codec.decode(asking, Open).compression == "fp8"
