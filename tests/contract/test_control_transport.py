"""What every control transport promises (transport/control.py), over memory and over a real NATS server."""

import asyncio
import time

import pytest

from common.errors import ControlDisconnected, ControlTimeout, NoResponders, PayloadTooLarge
from common.transport.control import ControlTransport, Incoming
from tests.contract.conftest import MAX_PAYLOAD, BusUnderTest
from tests.support.waiting import Collector


def ignore(incoming: Incoming) -> None:
    """Listens and never answers."""


def echo(incoming: Incoming) -> None:
    incoming.reply(b"echo " + incoming.payload)


async def pair(bus: BusUnderTest) -> tuple[ControlTransport, ControlTransport]:
    one, two = bus.client(), bus.client()
    await one.connect()
    await two.connect()
    return one, two


async def until_state(transport: ControlTransport, connected: bool) -> None:
    changed = asyncio.Event()
    transport.on_state(lambda _now: changed.set())
    async with asyncio.timeout(10):
        while transport.connected != connected:
            await changed.wait()
            changed.clear()


async def test_a_request_gets_its_answer(bus: BusUnderTest) -> None:
    asker, server = await pair(bus)
    await server.subscribe("a.b", echo)
    assert await asker.request("a.b", b"hello", 5) == b"echo hello"


async def test_answers_find_their_request_in_any_order(bus: BusUnderTest) -> None:
    asker, server = await pair(bus)
    held: list[Incoming] = []

    def answer_backwards(incoming: Incoming) -> None:
        held.append(incoming)
        if len(held) == 20:
            for one in reversed(held):
                one.reply(one.payload)

    await server.subscribe("a", answer_backwards)
    asked = [str(n).encode() for n in range(20)]
    assert await asyncio.gather(*(asker.request("a", payload, 5) for payload in asked)) == asked


async def test_nobody_listening_is_known_at_once(bus: BusUnderTest) -> None:
    asker, _ = await pair(bus)
    started = time.monotonic()
    with pytest.raises(NoResponders, match="nobody"):
        await asker.request("nobody", b"", 30)
    assert time.monotonic() - started < 1


async def test_an_unsubscribed_subject_has_no_responders(bus: BusUnderTest) -> None:
    asker, server = await pair(bus)
    subscription = await server.subscribe("a", echo)
    await asker.request("a", b"", 5)
    await subscription.unsubscribe()
    await server.subscribe("later", echo)  # in order after the unsubscribe
    with pytest.raises(NoResponders):
        await asker.request("a", b"", 5)


async def test_a_closed_client_has_no_responders(bus: BusUnderTest) -> None:
    asker, server = await pair(bus)
    await server.subscribe("a", echo)
    await server.close()
    assert not server.connected
    with pytest.raises(NoResponders):
        await asker.request("a", b"", 5)


async def test_silence_is_a_timeout(bus: BusUnderTest) -> None:
    asker, server = await pair(bus)
    await server.subscribe("a", ignore)
    with pytest.raises(ControlTimeout):
        await asker.request("a", b"", 0.05)


async def test_a_late_answer_disturbs_nobody(bus: BusUnderTest) -> None:
    asker, server = await pair(bus)
    held: Collector[Incoming] = Collector()
    await server.subscribe("late", held.add)
    await server.subscribe("a", echo)
    with pytest.raises(ControlTimeout):
        await asker.request("late", b"", 0.05)
    held.items[0].reply(b"too late")
    assert await asker.request("a", b"next", 5) == b"echo next"


async def test_publishing_reaches_every_subscriber_in_order(bus: BusUnderTest) -> None:
    sender, receiver = await pair(bus)
    first: Collector[bytes] = Collector()
    second: Collector[bytes] = Collector()
    await receiver.subscribe("a", lambda incoming: first.add(incoming.payload))
    await sender.subscribe("a", lambda incoming: second.add(incoming.payload))
    sent = [str(n).encode() for n in range(2000)]
    for payload in sent:
        sender.publish("a", payload)
    assert await first.wait_for(2000) == sent
    assert await second.wait_for(2000) == sent


async def test_a_queue_group_shares_and_loses_nothing(bus: BusUnderTest) -> None:
    sender, receiver = await pair(bus)
    everything: Collector[tuple[str, bytes]] = Collector()
    await sender.subscribe("a", lambda i: everything.add(("one", i.payload)), "group")
    await receiver.subscribe("a", lambda i: everything.add(("two", i.payload)), "group")
    sent = [str(n).encode() for n in range(200)]
    for payload in sent:
        sender.publish("a", payload)
    got = await everything.wait_for(200)
    assert sorted(payload for _, payload in got) == sorted(sent)
    assert {member for member, _ in got} == {"one", "two"}


async def test_the_payload_limit_is_known_and_kept(bus: BusUnderTest) -> None:
    asker, server = await pair(bus)
    await server.subscribe("a", echo)
    assert asker.max_payload == MAX_PAYLOAD
    with pytest.raises(PayloadTooLarge):
        asker.publish("a", bytes(MAX_PAYLOAD + 1))
    with pytest.raises(PayloadTooLarge):
        await asker.request("a", bytes(MAX_PAYLOAD + 1), 5)
    assert len(await asker.request("a", bytes(MAX_PAYLOAD - 5), 5)) == MAX_PAYLOAD


async def test_what_was_published_before_close_arrives(bus: BusUnderTest) -> None:
    sender, receiver = await pair(bus)
    got: Collector[bytes] = Collector()
    await receiver.subscribe("a", lambda incoming: got.add(incoming.payload))
    for _ in range(100):
        sender.publish("a", bytes(1000))
    await sender.close()
    await sender.close()
    await got.wait_for(100)


async def test_subscriptions_survive_a_server_restart(bus: BusUnderTest) -> None:
    asker, server = await pair(bus)
    await server.subscribe("a", echo)
    states: list[bool] = []
    asker.on_state(states.append)
    await bus.stop()
    await until_state(asker, connected=False)
    await until_state(server, connected=False)
    await bus.start()
    await until_state(asker, connected=True)
    await until_state(server, connected=True)
    assert await asker.request("a", b"again", 5) == b"echo again"
    assert states == [False, True]


async def test_a_pending_request_fails_when_the_server_dies(bus: BusUnderTest) -> None:
    asker, server = await pair(bus)
    arrived: Collector[Incoming] = Collector()
    await server.subscribe("a", arrived.add)
    pending = asyncio.ensure_future(asker.request("a", b"", 60))
    await arrived.wait_for(1)
    await bus.stop()
    with pytest.raises(ControlDisconnected):
        await pending
    with pytest.raises(ControlDisconnected):
        await asker.request("a", b"", 60)


async def test_publishing_without_a_server_is_dropped_silently(bus: BusUnderTest) -> None:
    sender, receiver = await pair(bus)
    got: Collector[bytes] = Collector()
    await receiver.subscribe("a", lambda incoming: got.add(incoming.payload))
    await bus.stop()
    await until_state(sender, connected=False)
    sender.publish("a", b"lost")
    await until_state(receiver, connected=False)
    await bus.start()
    await until_state(sender, connected=True)
    await until_state(receiver, connected=True)
    sender.publish("a", b"arrives")
    assert await got.wait_for(1) == [b"arrives"]


async def test_a_subscription_made_during_an_outage_holds_afterwards(bus: BusUnderTest) -> None:
    asker, server = await pair(bus)
    await bus.stop()
    await until_state(server, connected=False)
    await until_state(asker, connected=False)
    await server.subscribe("a", echo)
    await bus.start()
    await until_state(server, connected=True)
    await until_state(asker, connected=True)
    assert await asker.request("a", b"x", 5) == b"echo x"


async def test_connecting_waits_for_the_server_to_come(bus: BusUnderTest) -> None:
    await bus.stop()
    early = bus.client()
    connecting = asyncio.ensure_future(early.connect())
    await asyncio.wait([connecting], timeout=0.3)
    assert not connecting.done()
    assert not early.connected
    await bus.start()
    async with asyncio.timeout(10):
        await connecting
    assert early.connected


async def test_subscribing_before_connecting_is_refused(bus: BusUnderTest) -> None:
    with pytest.raises(ControlDisconnected):
        await bus.client().subscribe("a", echo)
