"""The in-process data plane: order, sizes, cancelled receives, and closing as a fence."""

import asyncio

import pytest

from common.errors import KVPeerLost, KVTransferError
from common.transport.inproc import EAGER_BYTES, InprocHub
from common.transport.kv import KVEndpoint
from tests.support.kv_pair import virtual

LARGE = EAGER_BYTES + 1


async def connected(hub: InprocHub) -> tuple[KVEndpoint, KVEndpoint]:
    """Both ends of a connection; they live as long as the server's event is not set."""
    server, client = hub.transport(), hub.transport()
    accepted: asyncio.Queue[KVEndpoint] = asyncio.Queue()

    async def keep(endpoint: KVEndpoint) -> None:
        accepted.put_nowait(endpoint)
        with pytest.raises(KVPeerLost):
            await endpoint.recv(bytearray(1), 999)

    await server.listen(keep)
    ours = await client.connect(server.address, 1)
    return ours, await accepted.get()


@virtual
async def test_messages_of_one_tag_keep_their_order_and_tags_are_apart() -> None:
    ours, theirs = await connected(InprocHub())
    for tag, data in ((1, b"a"), (2, b"x"), (1, b"b")):
        await ours.send(data, tag)
    first, second, other = bytearray(1), bytearray(1), bytearray(1)
    await theirs.recv(other, 2)
    await theirs.recv(first, 1)
    await theirs.recv(second, 1)
    assert [bytes(got) for got in (first, second, other)] == [b"a", b"b", b"x"]
    await ours.close()


@virtual
async def test_a_small_buffer_may_be_reused_at_once_a_large_one_when_received() -> None:
    ours, theirs = await connected(InprocHub())
    small, large = bytearray(b"s"), bytearray(LARGE)
    await ours.send(small, 1)
    small[:] = b"-"
    sending = asyncio.create_task(ours.send(large, 2))
    await asyncio.sleep(1)
    assert not sending.done()
    got = bytearray(1)
    await theirs.recv(got, 1)
    await theirs.recv(bytearray(LARGE), 2)
    await sending
    assert got == b"s"
    await ours.close()


@pytest.mark.parametrize("size", [1, 3])
@virtual
async def test_a_message_of_another_size_is_an_error(size: int) -> None:
    ours, theirs = await connected(InprocHub())
    await ours.send(b"ab", 1)
    with pytest.raises(KVTransferError):
        await theirs.recv(bytearray(size), 1)
    assert theirs.alive
    await ours.close()


@virtual
async def test_a_cancelled_receive_still_takes_its_message() -> None:
    ours, theirs = await connected(InprocHub())
    buffer = bytearray(1)
    receiving = asyncio.create_task(theirs.recv(buffer, 1))
    await asyncio.sleep(1)
    receiving.cancel()
    await asyncio.sleep(1)
    await ours.send(b"z", 1)
    assert buffer == b"z"
    await ours.close()


@virtual
async def test_close_is_a_fence_on_both_sides() -> None:
    ours, theirs = await connected(InprocHub(lambda _nbytes: 5.0))
    buffer = bytearray(LARGE)
    tasks = [
        asyncio.create_task(theirs.recv(buffer, 1)),
        asyncio.create_task(ours.send(b"z" * LARGE, 1)),
        asyncio.create_task(theirs.recv(bytearray(1), 2)),
    ]
    await asyncio.sleep(1)
    await theirs.close()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(result) for result in results] == [KVPeerLost] * 3
    await asyncio.sleep(10)
    assert buffer == bytearray(LARGE)
    assert not ours.alive
    assert not theirs.alive
    with pytest.raises(KVPeerLost):
        await ours.send(b"a", 1)
    await theirs.close()


@virtual
async def test_a_killed_process_takes_its_endpoints_and_its_address_along() -> None:
    hub = InprocHub()
    server, client = hub.transport(), hub.transport()
    await server.listen(lambda endpoint: endpoint.recv(bytearray(1), 1))
    endpoint = await client.connect(server.address, 1)
    server.kill()
    assert not endpoint.alive
    with pytest.raises(KVPeerLost):
        await client.connect(server.address, 1)
    with pytest.raises(KVPeerLost):
        await asyncio.gather(*server._tasks)
