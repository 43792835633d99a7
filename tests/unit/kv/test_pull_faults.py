"""Exporter and importer when something goes wrong: typed errors, every block back once."""

import asyncio
from dataclasses import replace

import pytest

from common.errors import KVMismatch, KVPeerLost, KVRevoked, KVTimeout, KVTransferError, KVUnknownLease
from common.ids import BlockId, LeaseId
from common.kv.transfer_token import TransferTokens
from common.kv.wire import FinalResult
from common.messages.handoff import KVHandoff, KVSource
from tests.support.kv_pair import FINAL, KV_TIMEOUT_S, LAYOUT, SECRET, Pair, key, ref, running, virtual

BLOCKS = [BlockId(number) for number in range(40)]


async def refused(pair: Pair, handoff: KVHandoff, error: type[KVTransferError]) -> KVTransferError:
    """Pull and fail with exactly `error`; the importer has released its blocks once, when all is quiet."""
    with pytest.raises(error) as raised:
        await pair.decode.importer.pull(handoff, BLOCKS)
    assert raised.type is error
    await asyncio.sleep(2 * KV_TIMEOUT_S)
    assert sorted(pair.decode.pool.released) == BLOCKS
    assert pair.decode.importer.num_quarantined == 0
    pair.decode.pool.released.clear()
    return raised.value


async def still_works(pair: Pair, number: int = 99) -> None:
    """Another request goes through between the same two."""
    blocks = [BlockId(number) for number in range(64, 104)]
    lease = pair.prefill.lease(blocks, number=number)
    pair.prefill.exporter.finish(lease, FINAL)
    await pair.decode.importer.pull(pair.granted(lease, 40), blocks)
    assert pair.decode.pool.content(blocks) == pair.prefill.pool.content(blocks)


@virtual
async def test_an_unknown_lease() -> None:
    async with running() as pair:
        tokens = TransferTokens(SECRET, pair.prefill.me)
        grant = tokens.grant(LeaseId("never-was"), 1, pair.decode.me, pair.prefill.clock.now() + 60)
        await refused(pair, pair.prefill.handoff(grant, 40), KVUnknownLease)
        await still_works(pair)


@virtual
async def test_a_forged_token_shows_nothing() -> None:
    async with running() as pair:
        lease = pair.prefill.lease(BLOCKS)
        handoff = pair.granted(lease, 40)
        forged = replace(handoff.grant, token=handoff.grant.token[:-1] + "x")
        no_lease = replace(handoff.grant, lease=LeaseId("other"))
        first = await refused(pair, replace(handoff, grant=forged), KVUnknownLease)
        second = await refused(pair, replace(handoff, grant=no_lease), KVUnknownLease)
        assert first.message == second.message
        assert pair.prefill.num_sends == 0


@virtual
async def test_an_expired_token() -> None:
    async with running() as pair:
        lease = pair.prefill.lease(BLOCKS, life_s=600)
        generation = pair.prefill.exporter.table.bind(lease, pair.decode.me)
        tokens = TransferTokens(SECRET, pair.prefill.me)
        grant = tokens.grant(lease, generation, pair.decode.me, pair.prefill.clock.now() + 1)
        await asyncio.sleep(2)
        await refused(pair, pair.prefill.handoff(grant, 40), KVRevoked)
        assert pair.prefill.num_sends == 0


@virtual
async def test_a_token_of_another_reader_is_not_even_tried() -> None:
    async with running() as pair:
        lease = pair.prefill.lease(BLOCKS)
        grant = pair.prefill.exporter.bind(lease, ref("somebody-else"))
        await refused(pair, pair.prefill.handoff(grant, 40), KVMismatch)


@pytest.mark.parametrize(
    "change",
    [
        {"fingerprint": "other-weights"},
        {"prompt_ids": tuple(range(41 * 16))},
        {"sources": (KVSource("a", (0, 1), (0, 3)), KVSource("b", (1, 2), (0, 3)))},
        {"sources": ()},
    ],
)
@virtual
async def test_what_does_not_fit_is_a_mismatch(change: dict[str, object]) -> None:
    async with running() as pair:
        handoff = pair.granted(pair.prefill.lease(BLOCKS), 40)
        await refused(pair, replace(handoff, **change), KVMismatch)  # type: ignore[arg-type]
        assert pair.prefill.num_sends == 0


@virtual
async def test_the_exporter_compares_fingerprints_too() -> None:
    async with running() as pair:
        handoff = pair.granted(pair.prefill.lease(BLOCKS), 40)
        pair.prefill.exporter._fingerprint = "other-weights"
        await refused(pair, handoff, KVMismatch)
        assert pair.prefill.num_sends == 0


@virtual
async def test_a_rebind_revokes_the_first_reader_and_serves_the_second() -> None:
    async with running() as pair:
        lease = pair.prefill.lease(BLOCKS, num_ready=10 * 16)
        first = asyncio.create_task(refused(pair, pair.granted(lease, 40), KVRevoked))
        await asyncio.sleep(1)
        second = pair.granted(lease, 40)
        await first
        pair.prefill.exporter.finish(lease, FINAL)
        await pair.decode.importer.pull(second, BLOCKS)
        assert pair.decode.pool.content(BLOCKS) == pair.prefill.pool.content(BLOCKS)


@virtual
async def test_no_rebind_after_final() -> None:
    async with running() as pair:
        lease = pair.prefill.lease(BLOCKS)
        pair.prefill.exporter.finish(lease, FINAL)
        exporter = pair.prefill.exporter
        handoff = pair.granted(lease, 40)
        exporter.table.give_final(lease, handoff.grant.generation)
        with pytest.raises(KVRevoked):
            exporter.bind(lease, ref("another"))


@virtual
async def test_an_abort_mid_pull_frees_both_sides() -> None:
    async with running() as pair:
        lease = pair.prefill.lease(BLOCKS, num_ready=10 * 16)
        pulling = asyncio.create_task(refused(pair, pair.granted(lease, 40), KVRevoked))
        await asyncio.sleep(1)
        assert pair.prefill.pool.released == []
        assert pair.prefill.exporter.abort(key())
        await asyncio.sleep(0.1)
        assert pair.prefill.pool.released == BLOCKS
        await pulling
        assert not pair.prefill.exporter.abort(key())
        pair.prefill.pool.released.clear()
        await still_works(pair)


@virtual
async def test_a_lease_ends_at_its_deadline() -> None:
    async with running() as pair:
        lease = pair.prefill.lease(BLOCKS, num_ready=0, life_s=5)
        handoff = pair.granted(lease, 40)
        assert pair.prefill.exporter.leases == {"waiting": 1, "reading": 0, "ending": 0}
        started = pair.prefill.clock.now()
        with pytest.raises(KVRevoked):
            await pair.decode.importer.pull(handoff, BLOCKS)
        assert pair.prefill.clock.now() - started == pytest.approx(5, abs=0.1)
        assert pair.prefill.pool.released == BLOCKS


@virtual
async def test_blocks_in_a_slow_send_stay_until_it_has_ended() -> None:
    async with running(lambda nbytes: 3.0 if nbytes == LAYOUT.block_bytes else 0.001) as pair:
        lease = pair.prefill.lease(BLOCKS)
        pulling = asyncio.create_task(refused(pair, pair.granted(lease, 40), KVRevoked))
        await asyncio.sleep(1)
        pair.prefill.exporter.abort(key())
        await asyncio.sleep(1.9)
        assert pair.prefill.pool.released == []
        assert pair.prefill.exporter.leases["ending"] == 1
        await asyncio.sleep(0.2)
        assert pair.prefill.pool.released == BLOCKS
        await pulling


@virtual
async def test_a_send_that_never_ends_is_fenced_after_kv_timeout() -> None:
    async with running(lambda nbytes: 1e6 if nbytes == LAYOUT.block_bytes else 0.001) as pair:
        lease = pair.prefill.lease(BLOCKS)
        handoff = pair.granted(lease, 40)
        pulling = asyncio.create_task(pair.decode.importer.pull(handoff, BLOCKS))
        await asyncio.sleep(1)
        pair.prefill.exporter.abort(key())
        await asyncio.sleep(KV_TIMEOUT_S - 0.1)
        assert pair.prefill.pool.released == []
        await asyncio.sleep(0.2)
        assert pair.prefill.pool.released == BLOCKS
        with pytest.raises(KVRevoked):
            await pulling
        assert pair.decode.pool.released == BLOCKS


@virtual
async def test_a_fence_lets_other_pulls_go_on_over_a_new_endpoint() -> None:
    async with running() as pair:
        pair.prefill.hold_sends_from = 1
        stuck = pair.prefill.lease(BLOCKS, number=1)
        first = asyncio.create_task(refused(pair, pair.granted(stuck, 40), KVRevoked))
        await pair.prefill.send_held.wait()
        await asyncio.sleep(1)
        pair.prefill.exporter.abort(key(1))
        await asyncio.sleep(KV_TIMEOUT_S / 2)
        others = [BlockId(number) for number in range(50, 60)]
        lease = pair.prefill.lease(others, number=2)
        second = asyncio.create_task(pair.decode.importer.pull(pair.granted(lease, 10), others))
        pair.prefill.exporter.finish(lease, FINAL)
        await asyncio.sleep(KV_TIMEOUT_S / 2 - 0.1)
        assert not second.done()
        pair.prefill.hold_sends_from = 0
        await second
        assert pair.decode.pool.content(others) == pair.prefill.pool.content(others)
        await first


@virtual
async def test_a_dead_reader_is_fenced_at_once() -> None:
    async with running(lambda nbytes: 1e6 if nbytes == LAYOUT.block_bytes else 0.001) as pair:
        lease = pair.prefill.lease(BLOCKS)
        pulling = asyncio.create_task(pair.decode.importer.pull(pair.granted(lease, 40), BLOCKS))
        await asyncio.sleep(1)
        assert pair.prefill.exporter.reader_dead(pair.decode.me) == [lease]
        await asyncio.sleep(0.1)
        assert pair.prefill.pool.released == BLOCKS
        with pytest.raises(KVTransferError):
            await pulling


@virtual
async def test_cancel_quarantines_until_the_receive_has_completed() -> None:
    async with running(lambda nbytes: 3.0 if nbytes == LAYOUT.block_bytes else 0.001) as pair:
        lease = pair.prefill.lease(BLOCKS)
        pulling = asyncio.create_task(pair.decode.importer.pull(pair.granted(lease, 40), BLOCKS))
        await asyncio.sleep(1)
        pulling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pulling
        assert pair.decode.pool.released == []
        assert pair.decode.importer.num_quarantined == 40
        await asyncio.sleep(2.1)
        assert pair.decode.pool.released == BLOCKS
        assert pair.decode.importer.num_quarantined == 0
        assert pair.prefill.pool.released == []  # the reader may come back; the lease is not its to end
        before = pair.decode.pool.content(BLOCKS)
        await asyncio.sleep(60)
        assert pair.decode.pool.content(BLOCKS) == before
        pair.decode.pool.released.clear()
        await still_works(pair)


@virtual
async def test_cancel_while_nothing_is_ready_gives_blocks_back_soon() -> None:
    async with running() as pair:
        lease = pair.prefill.lease(BLOCKS, num_ready=0)
        pulling = asyncio.create_task(pair.decode.importer.pull(pair.granted(lease, 40), BLOCKS))
        await asyncio.sleep(1)
        pulling.cancel()
        await asyncio.sleep(0.1)
        assert pair.decode.pool.released == BLOCKS


@virtual
async def test_quarantine_ends_by_closing_the_endpoint_when_the_exporter_does_not_answer() -> None:
    async with running() as pair:
        pair.prefill.hold_sends_from = 1
        lease = pair.prefill.lease(BLOCKS)
        pulling = asyncio.create_task(pair.decode.importer.pull(pair.granted(lease, 40), BLOCKS))
        await pair.prefill.send_held.wait()
        pulling.cancel()
        await asyncio.sleep(KV_TIMEOUT_S - 0.1)
        assert pair.decode.importer.num_quarantined == 40
        await asyncio.sleep(0.2)
        assert pair.decode.pool.released == BLOCKS
        pair.prefill.sends_go_on.set()
        await asyncio.sleep(0.1)
        assert pair.decode.pool.content(BLOCKS) == [b"\xff" * LAYOUT.block_bytes] * 40


@virtual
async def test_an_exporter_that_dies_mid_pull_is_noticed_at_once() -> None:
    async with running() as pair:
        pair.prefill.hold_sends_from = 20
        lease = pair.prefill.lease(BLOCKS)
        pulling = asyncio.create_task(refused(pair, pair.granted(lease, 40), KVPeerLost))
        await pair.prefill.send_held.wait()
        died = pair.prefill.clock.now()
        pair.prefill.transport.kill()
        await asyncio.sleep(0.01)
        assert pair.decode.pool.released == BLOCKS
        assert pair.prefill.clock.now() - died < 0.1
        pair.prefill.sends_go_on.set()
        await pulling


@virtual
async def test_nobody_there() -> None:
    async with running() as pair:
        handoff = pair.granted(pair.prefill.lease(BLOCKS), 40)
        pair.prefill.transport.kill()
        await refused(pair, handoff, KVPeerLost)


@virtual
async def test_a_silent_exporter_times_out() -> None:
    async with running() as pair:
        pair.prefill.hold_sends_from = 1
        handoff = pair.granted(pair.prefill.lease(BLOCKS), 40)
        started = pair.prefill.clock.now()
        with pytest.raises(KVTimeout):
            await pair.decode.importer.pull(handoff, BLOCKS)
        assert pair.prefill.clock.now() - started == pytest.approx(KV_TIMEOUT_S, abs=0.1)
        pair.prefill.sends_go_on.set()


@virtual
async def test_the_requests_own_time_bounds_a_pull() -> None:
    async with running() as pair:
        lease = pair.prefill.lease(BLOCKS, num_ready=0)
        started = pair.prefill.clock.now()
        with pytest.raises(KVTimeout):
            await pair.decode.importer.pull(pair.granted(lease, 40, time_left_s=30.0), BLOCKS)
        assert pair.prefill.clock.now() - started == pytest.approx(30, abs=0.1)


@virtual
async def test_a_lost_acknowledgement_is_repeated() -> None:
    async with running() as pair:
        lease = pair.prefill.lease(BLOCKS)
        pair.prefill.exporter.finish(lease, FINAL)
        result = await pair.decode.importer.pull(pair.granted(lease, 40), BLOCKS)
        for endpoint in pair.prefill.transport._endpoints:
            endpoint.lose("cut before the acknowledgement")
        assert replace(result.final, age_s=0.0) == FINAL
        await asyncio.sleep(1)
        assert pair.prefill.pool.released == BLOCKS
        assert pair.decode.pool.released == []


@virtual
async def test_a_broken_protocol_closes_the_endpoint() -> None:
    async with running() as pair:
        endpoint = await pair.decode.transport.connect(pair.prefill.transport.address, 1)
        await endpoint.send(b"GET / HTTP/1.1\r\nHost: you\r\n\r\n", 0)
        await asyncio.sleep(0.1)
        assert not endpoint.alive
        await still_works(pair)


@virtual
async def test_a_final_without_a_choice_is_none() -> None:
    async with running() as pair:
        lease = pair.prefill.lease(BLOCKS)
        pair.prefill.exporter.finish(lease, FinalResult(()))
        error = await refused(pair, pair.granted(lease, 40), KVPeerLost)
        assert "FINAL without a choice" in error.message
        pair.prefill.exporter.abort(key())
        await still_works(pair)
