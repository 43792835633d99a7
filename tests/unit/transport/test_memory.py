"""What only the in-memory bus can do: faults by message, delays, and the death of one client."""

import asyncio

import pytest

from common.errors import ControlDisconnected, ControlTimeout, NoResponders
from common.messages.codec import encode
from common.messages.generation import Accepted
from common.messages.stream import Frame
from common.transport.control import Incoming
from common.transport.memory import MemoryHub, MemoryTransport
from tests.support.faulty import Faults, kinds_of
from tests.support.fleet import ref
from tests.support.virtual_loop import run_virtual

ACCEPTED = encode(Accepted())


def accept(incoming: Incoming) -> None:
    incoming.reply(ACCEPTED)


async def pair(hub: MemoryHub) -> tuple[MemoryTransport, MemoryTransport]:
    one, two = hub.client(), hub.client()
    await one.connect()
    await two.connect()
    return one, two


def test_a_rule_drops_exactly_what_it_says() -> None:
    async def main() -> list[bytes]:
        faults = Faults()
        one, two = await pair(MemoryHub(faults))
        got: list[bytes] = []
        await two.subscribe("a", lambda incoming: got.append(incoming.payload))
        rule = faults.drop("x", subject="a", times=2, skip=1)
        for number in range(6):
            one.publish("a", b'{"kind": "x", "n": %d}' % number)
            one.publish("a", b'{"kind": "y", "n": %d}' % number)
        await asyncio.sleep(1)
        assert rule.hits == 2
        assert faults.seen == {"x": 6, "y": 6}
        return got

    kept = [payload for payload in run_virtual(main()) if b'"x"' in payload]
    assert kept == [b'{"kind": "x", "n": %d}' % number for number in (0, 3, 4, 5)]


def test_a_lost_answer_is_a_timeout_at_its_deadline() -> None:
    async def main() -> float:
        faults = Faults()
        one, two = await pair(MemoryHub(faults))
        await two.subscribe("a", accept)
        faults.drop("accepted", subject="_INBOX.a")
        started = asyncio.get_running_loop().time()
        with pytest.raises(ControlTimeout):
            await one.request("a", b"{}", 0.5)
        waited = asyncio.get_running_loop().time() - started
        assert await one.request("a", b"{}", 0.5) == ACCEPTED
        return waited

    assert run_virtual(main()) == pytest.approx(0.5)


def test_a_delayed_message_is_overtaken() -> None:
    async def main() -> list[bytes]:
        faults = Faults()
        one, two = await pair(MemoryHub(faults))
        got: list[bytes] = []
        await two.subscribe("a", lambda incoming: got.append(incoming.payload))
        faults.delay(1.0, subject="a")
        one.publish("a", b"1")
        one.publish("a", b"2")
        await asyncio.sleep(2)
        return got

    assert run_virtual(main()) == [b"2", b"1"]


def test_a_killed_client_is_gone_and_its_requests_fail() -> None:
    async def main() -> None:
        one, two = await pair(MemoryHub())
        await two.subscribe("a", accept)
        await one.subscribe("silent", lambda _incoming: None)
        pending = asyncio.ensure_future(two.request("silent", b"", 10))
        await asyncio.sleep(0)
        two.kill()
        with pytest.raises(ControlDisconnected):
            await pending
        with pytest.raises(NoResponders):
            await one.request("a", b"", 10)
        two.publish("a", b"from the grave")

    run_virtual(main())


def test_a_disconnected_client_misses_and_comes_back() -> None:
    async def main() -> list[bytes]:
        one, two = await pair(MemoryHub())
        states: list[bool] = []
        two.on_state(states.append)
        got: list[bytes] = []
        await two.subscribe("a", lambda incoming: got.append(incoming.payload))
        two.disconnect()
        one.publish("a", b"missed")
        await asyncio.sleep(1)
        two.reconnect()
        one.publish("a", b"heard")
        await asyncio.sleep(1)
        assert states == [False, True]
        return got

    assert run_virtual(main()) == [b"heard"]


def test_kinds_of_a_frame_are_its_items_too() -> None:
    worker = ref("d1")
    frame = encode(Frame(worker.instance, worker.incarnation, 1, ()))
    assert kinds_of(frame) == ("frame",)
    assert kinds_of(b'{"kind": "frame", "items": [{"kind": "tokens"}, {"kind": "tokens"}]}') == (
        "frame",
        "tokens",
    )
    assert kinds_of(b"part {}\nxyz") == ("part",)
    assert kinds_of(b"\xff") == ()
