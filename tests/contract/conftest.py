"""The buses under contract: the in-memory hub and a real nats-server, driven through one small interface."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from typing import Protocol

import pytest
import uvloop

from common.transport.control import ControlTransport
from common.transport.memory import MemoryHub
from common.transport.nats import NatsTransport
from tests.support.nats import NatsServer, running_nats

MAX_PAYLOAD = 4096


class BusUnderTest(Protocol):
    def client(self) -> ControlTransport:
        """A new client, not yet connected; closed by the fixture."""
        ...

    async def stop(self) -> None: ...

    async def start(self) -> None: ...


class MemoryBus:
    def __init__(self) -> None:
        self._hub = MemoryHub(max_payload=MAX_PAYLOAD)

    def client(self) -> ControlTransport:
        return self._hub.client()

    async def stop(self) -> None:
        self._hub.stop()

    async def start(self) -> None:
        self._hub.start()


class NatsBus:
    def __init__(
        self, server: NatsServer, on_exit: Callable[[Callable[[], Awaitable[None]]], object]
    ) -> None:
        self._server = server
        self._on_exit = on_exit
        self._clients = 0

    def client(self) -> ControlTransport:
        self._clients += 1
        client = NatsTransport(self._server.url, name=f"client-{self._clients}")
        self._on_exit(client.close)
        return client

    async def stop(self) -> None:
        await self._server.stop()

    async def start(self) -> None:
        await self._server.start()


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The loop of the real services: its order of callbacks differs from asyncio's own."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(params=["memory", "nats"])
async def bus(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[BusUnderTest]:
    if request.param == "memory":
        yield MemoryBus()
        return
    config = tmp_path_factory.mktemp("nats") / "nats.conf"
    config.write_text(f"max_payload: {MAX_PAYLOAD}\n")
    async with running_nats("--config", str(config)) as server, AsyncExitStack() as stack:
        yield NatsBus(server, stack.push_async_callback)
