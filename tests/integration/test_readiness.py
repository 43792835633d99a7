"""Looking at a port that may be anybody's: a look ends, whatever listens there."""

import asyncio

import pytest

from deploy.local import readiness


async def greeting(said: bytes) -> bool:
    """What `nats_greets` makes of a server that says `said` and then nothing."""
    connected: list[asyncio.StreamWriter] = []

    def talk(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected.append(writer)
        writer.write(said)

    async with await asyncio.start_server(talk, "127.0.0.1", 0) as server:
        try:
            return await readiness.nats_greets(server.sockets[0].getsockname()[1])
        finally:
            for writer in connected:
                writer.close()


async def test_a_nats_server_is_known_by_its_greeting() -> None:
    assert await greeting(b'INFO {"server_id": "x"}\r\n')
    assert not await greeting(b"SSH-2.0-x\r\n")


async def test_a_server_that_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "PROBE_TIMEOUT_S", 0.05)
    async with asyncio.timeout(5):
        assert not await greeting(b"")


async def test_nobody_is_no_nats_server() -> None:
    assert not await readiness.nats_greets(readiness.free_port())
