"""Exporter and importer together when all goes well: content, order, overlap, FINAL, acknowledgement."""

import asyncio
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from common.ids import BlockId
from common.kv.control_stream import ControlStream
from common.kv.wire import Kind, Open, WireMessage
from common.messages import codec
from tests.support.kv_pair import FINAL, FINGERPRINT, LAYOUT, Decode, key, running, virtual
from tests.support.virtual_loop import run_virtual


def ids(*numbers: int) -> list[BlockId]:
    return [BlockId(number) for number in numbers]


@virtual
async def test_a_finished_prefill_is_pulled_and_its_blocks_go_back() -> None:
    async with running() as pair:
        source, target = ids(*range(40)), ids(*reversed(range(50, 90)))
        lease = pair.prefill.lease(source)
        pair.prefill.exporter.finish(lease, FINAL)
        result = await pair.decode.importer.pull(pair.granted(lease, 40), target)
        assert replace(result.final, age_s=0.0) == FINAL
        assert result.num_bytes == 40 * LAYOUT.block_bytes
        assert result.transport == "inproc"
        assert 0.001 < result.seconds < 0.1
        assert pair.decode.pool.content(target) == pair.prefill.pool.content(source)
        await asyncio.sleep(0.1)
        assert pair.prefill.pool.released == source
        assert pair.decode.pool.released == []


@settings(max_examples=20)
@given(
    num_tokens=st.integers(1, 40 * 16),
    steps=st.lists(st.integers(1, 200), max_size=10),
    delay_s=st.sampled_from([0.0, 0.01, 0.7]),
)
def test_any_chunking_gives_the_same_bytes(num_tokens: int, steps: list[int], delay_s: float) -> None:
    async def scenario() -> None:
        async with running(lambda _nbytes: delay_s) as pair:
            num_blocks = LAYOUT.blocks_for(num_tokens)
            source = ids(*range(num_blocks))
            exporter = pair.prefill.exporter
            lease = exporter.start(key(), source, num_tokens, pair.prefill.clock.now() + 600, 0)
            handoff = pair.granted(lease, num_blocks, prompt_ids=tuple(range(num_tokens)))
            pulling = asyncio.create_task(pair.decode.importer.pull(handoff, source))
            done = 0
            for step in steps:
                await asyncio.sleep(0.3)
                done += step
                pair.prefill.pool.write(source[: LAYOUT.blocks_for(done)])
                exporter.advance(lease, done)
            await asyncio.sleep(0.3)
            pair.prefill.pool.write(source)
            exporter.finish(lease, FINAL)
            await pulling
            assert pair.decode.pool.content(source) == pair.prefill.pool.content(source)

    run_virtual(scenario())


@virtual
async def test_blocks_travel_while_later_chunks_are_computed() -> None:
    async with running() as pair:
        blocks = ids(*range(8))
        lease = pair.prefill.lease(blocks, num_ready=0)
        pulling = asyncio.create_task(pair.decode.importer.pull(pair.granted(lease, 8), blocks))
        await asyncio.sleep(30)  # PENDING keeps the reader waiting past kv_timeout_s
        assert pair.prefill.num_sends == 0
        pair.prefill.exporter.advance(lease, 5 * 16 + 15)
        await asyncio.sleep(0.1)
        arrived = pair.decode.pool.content(blocks)
        assert arrived[:5] == pair.prefill.pool.content(blocks)[:5]
        assert arrived[5:] == [b"\xff" * LAYOUT.block_bytes] * 3
        pair.prefill.exporter.advance(lease, 8 * 16)
        await asyncio.sleep(30)
        assert not pulling.done()  # every block is there, but not FINAL
        pair.prefill.exporter.finish(lease, FINAL)
        assert replace((await pulling).final, age_s=0.0) == FINAL


@virtual
async def test_a_send_that_is_overtaken_does_not_mix_blocks_up() -> None:
    async with running() as pair:
        blocks = ids(*range(8))
        held: list[int] = []

        async def third_waits() -> None:
            held.append(1)
            if len(held) == 3:
                await asyncio.sleep(1)

        pair.prefill._may_send = third_waits  # type: ignore[method-assign]
        lease = pair.prefill.lease(blocks)
        pair.prefill.exporter.finish(lease, FINAL)
        await pair.decode.importer.pull(pair.granted(lease, 8), blocks)
        assert pair.decode.pool.content(blocks) == pair.prefill.pool.content(blocks)


@virtual
async def test_several_pulls_share_one_endpoint() -> None:
    async with running() as pair:
        connects = 0
        connect = pair.decode.transport.connect

        async def counted(address: str, timeout_s: float) -> object:
            nonlocal connects
            connects += 1
            return await connect(address, timeout_s)

        pair.decode.transport.connect = counted  # type: ignore[method-assign, assignment]
        pulls = []
        for number in range(4):
            blocks = ids(*range(number * 20, number * 20 + 20))
            lease = pair.prefill.lease(blocks, number=number)
            pair.prefill.exporter.finish(lease, FINAL)
            pulls.append(pair.decode.importer.pull(pair.granted(lease, 20), blocks))
        await asyncio.gather(*pulls)
        everything = ids(*range(80))
        assert connects == 1
        assert pair.decode.pool.content(everything) == pair.prefill.pool.content(everything)


@virtual
async def test_final_is_repeatable_and_one_endpoint_owns_the_generation() -> None:
    """By hand over two endpoints, as no importer would do it."""
    async with running() as pair:
        blocks = ids(0)
        lease = pair.prefill.lease(blocks)
        pair.prefill.exporter.finish(lease, FINAL)
        grant = pair.prefill.exporter.bind(lease, pair.decode.me)
        opening = WireMessage(Kind.OPEN, 1, count=1, body=codec.encode(Open(grant, FINGERPRINT)))
        answers: list[tuple[int, Kind]] = []
        streams, tasks, endpoints = [], [], []
        for side in range(2):
            endpoint = await pair.decode.transport.connect(pair.prefill.transport.address, 1)
            stream = ControlStream(endpoint)
            note = lambda message, side=side: answers.append((side, message.kind))  # noqa: E731
            tasks.append(asyncio.create_task(stream.run(note)))
            streams.append(stream)
            endpoints.append(endpoint)
            stream.post(opening)
            await asyncio.sleep(0.1)
        assert answers == [(1, Kind.REVOKED)]
        for _ in range(2):
            streams[0].post(WireMessage(Kind.ASK_FINAL, 1))
            await asyncio.sleep(0.1)
        assert answers[1:] == [(0, Kind.FINAL)] * 2
        await endpoints[0].close()
        await asyncio.sleep(0.1)
        streams[1].post(WireMessage(Kind.OPEN, 2, count=1, body=opening.body))
        streams[1].post(WireMessage(Kind.ASK_FINAL, 2))
        await asyncio.sleep(0.1)
        assert answers[3:] == [(1, Kind.FINAL)]  # the owner is closed: whoever shows the token next owns it
        streams[1].post(WireMessage(Kind.ACK, 2))
        await asyncio.sleep(0.1)
        assert answers[4:] == [(1, Kind.ACKED)]
        assert pair.prefill.pool.released == blocks
        await endpoints[1].close()
        await asyncio.gather(*tasks)


@virtual
async def test_two_readers_pull_from_one_exporter() -> None:
    async with running() as pair:
        other = Decode(pair.hub, "decode-2")
        for decode, blocks in ((pair.decode, ids(0, 1)), (other, ids(2, 3))):
            lease = pair.prefill.lease(blocks, number=blocks[0])
            pair.prefill.exporter.finish(lease, FINAL)
            grant = pair.prefill.exporter.bind(lease, decode.me)
            await decode.importer.pull(pair.prefill.handoff(grant, 2), blocks)
            assert decode.pool.content(blocks) == pair.prefill.pool.content(blocks)
        await other.importer.close()


@virtual
async def test_blocks_that_are_there_already_are_neither_asked_for_nor_written() -> None:
    async with running() as pair:
        source, target = ids(*range(40)), ids(*range(50, 90))
        lease = pair.prefill.lease(source)
        pair.prefill.exporter.finish(lease, FINAL)
        result = await pair.decode.importer.pull(pair.granted(lease, 40), target, 25)
        assert result.num_bytes == 15 * LAYOUT.block_bytes
        assert pair.prefill.num_sends == 15
        assert pair.decode.pool.content(target)[:25] == [b"\xff" * LAYOUT.block_bytes] * 25
        assert pair.decode.pool.content(target)[25:] == pair.prefill.pool.content(source)[25:]
        await asyncio.sleep(0.1)
        assert pair.prefill.pool.released == source


@virtual
async def test_final_alone_is_fetched_when_every_block_is_there() -> None:
    async with running() as pair:
        blocks = ids(*range(8))
        lease = pair.prefill.lease(blocks, num_ready=0)
        pulling = asyncio.create_task(pair.decode.importer.pull(pair.granted(lease, 8), blocks, 8))
        await asyncio.sleep(30)
        assert not pulling.done()
        pair.prefill.exporter.finish(lease, FINAL)
        assert (await pulling).num_bytes == 0
        assert pair.prefill.num_sends == 0
