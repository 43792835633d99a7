"""What only a real NATS server shows: hung and choosy servers, several of them, drops and overflow."""

import asyncio
import os
import signal
from pathlib import Path

import structlog

from common.transport.control import Incoming
from common.transport.nats import NatsTransport
from tests.support.nats import NatsServer, running_nats
from tests.support.waiting import Collector


def echo(incoming: Incoming) -> None:
    incoming.reply(incoming.payload)


async def until_connected(transport: NatsTransport, connected: bool, timeout_s: float = 10) -> None:
    changed = asyncio.Event()
    transport.on_state(lambda _now: changed.set())
    async with asyncio.timeout(timeout_s):
        while transport.connected != connected:
            await changed.wait()
            changed.clear()


async def test_it_moves_to_another_server() -> None:
    first, second = NatsServer(), NatsServer()
    client = NatsTransport(f"{first.url}, {second.url}", name="mover")
    try:
        await first.start()
        await client.connect()
        await client.subscribe("a", echo)
        states: Collector[bool] = Collector()
        client.on_state(states.add)
        await first.stop()
        await second.start()
        assert await states.wait_for(2) == [False, True]
        assert await client.request("a", b"x", 5) == b"x"
    finally:
        await client.close()
        await first.stop()
        await second.stop()


async def test_closing_ends_wherever_connecting_is() -> None:
    """nats-py swallows a cancellation that comes while it connects."""
    async with running_nats() as nats:
        connected = False
        turns = 0
        while not connected:
            client = NatsTransport(nats.url, name="hasty")
            connecting = asyncio.create_task(client.connect())
            for _ in range(turns):
                await asyncio.sleep(0)
            connected = client.connected
            connecting.cancel()
            async with asyncio.timeout(5):
                await client.close()
            assert not client.connected
            turns += 1


async def test_a_hung_server_never_blocks_publishing_and_memory_stays_bounded() -> None:
    async with running_nats() as nats:
        client = NatsTransport(nats.url, name="sender", max_outgoing_bytes=1 << 20)
        await client.connect()
        os.kill(nats.pid, signal.SIGSTOP)
        try:
            for _ in range(2000):
                client.publish("a", bytes(100_000))
                await asyncio.sleep(0)
        finally:
            os.kill(nats.pid, signal.SIGCONT)
        assert 0 < client.num_dropped <= 2000
        await client.subscribe("b", echo)
        assert await client.request("b", b"still here", 10) == b"still here"
        await client.close()


async def test_a_refused_password_is_tried_again_until_it_is_right(tmp_path: Path) -> None:
    config = tmp_path / "nats.conf"
    config.write_text("authorization { user: u, password: other }\n")
    async with running_nats("--config", str(config)) as nats:
        url = nats.url.replace("nats://", "nats://u:secret@")
        client = NatsTransport(url, name="client")
        connecting = asyncio.ensure_future(client.connect())
        await asyncio.wait([connecting], timeout=0.5)
        assert not connecting.done()
        await nats.stop()
        config.write_text("authorization { user: u, password: secret }\n")
        await nats.start()
        async with asyncio.timeout(10):
            await connecting
        assert client.connected
        await client.close()


async def test_closing_without_a_server_is_quick() -> None:
    async with running_nats() as nats:
        client = NatsTransport(nats.url, name="client")
        await client.connect()
        await nats.stop()
        await until_connected(client, False)
        async with asyncio.timeout(2):
            await client.close()
        assert not client.connected
    never = NatsTransport(f"nats://127.0.0.1:{nats.port}", name="never")
    connecting = asyncio.ensure_future(never.connect())
    await asyncio.wait([connecting], timeout=0.2)
    async with asyncio.timeout(2):
        await never.close()
    connecting.cancel()
    await asyncio.wait([connecting])


async def test_many_restarts_leave_one_subscription_each() -> None:
    async with running_nats() as nats:
        client = NatsTransport(nats.url, name="client")
        await client.connect()
        got: Collector[bytes] = Collector()
        await client.subscribe("a", lambda incoming: got.add(incoming.payload))
        for number in range(5):
            await nats.stop()
            await until_connected(client, False)
            await nats.start()
            await until_connected(client, True)
            client.publish("a", str(number).encode())
            await got.wait_for(number + 1)
        client.publish("a", b"end")
        await got.wait_for(6)
        assert got.items == [b"0", b"1", b"2", b"3", b"4", b"end"]
        await client.close()


async def test_the_same_trouble_is_told_once() -> None:
    server = NatsServer()
    client = NatsTransport(server.url, name="patient")
    with structlog.testing.capture_logs() as logs:
        connecting = asyncio.ensure_future(client.connect())
        await asyncio.wait([connecting], timeout=1.5)
        told = [entry["error"] for entry in logs if entry["event"] == "NATS trouble"]
        assert len(told) == len(set(told)) > 0
        await server.start()
        async with asyncio.timeout(10):
            await connecting
    await client.close()
    await server.stop()
