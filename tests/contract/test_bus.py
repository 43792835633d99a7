"""The typed bus over both transports: unions of kinds, parts, bad payloads, failing handlers."""

import asyncio

import pytest

from common.errors import ControlTimeout, MessageInvalid, NoResponders, PayloadTooLarge
from common.ids import AttemptKey, Incarnation, InstanceId, InstanceRef, RequestId
from common.messages.generation import Abort, Accepted, Job, Refused, SamplingParams
from common.messages.subjects import Subjects
from common.observability.metrics import RouterMetrics
from common.runtime.bus import MessageBus, Reply
from tests.contract.conftest import MAX_PAYLOAD, BusUnderTest
from tests.support.waiting import Collector

KEY = AttemptKey(RequestId("r"), 1, 0)
WORKER = InstanceRef(InstanceId("p1"), Incarnation("i1"))


def job(num_tokens: int, request: str = "r") -> Job:
    return Job(
        key=AttemptKey(RequestId(request), 1, 0),
        gateway=InstanceId("g1"),
        worker=WORKER,
        decode=None,
        prompt_ids=tuple(range(num_tokens)),
        output_ids=(),
        sampling=SamplingParams(max_tokens=5, seed=1),
        time_left_s=10.0,
        age_s=0.0,
    )


async def pair(bus: BusUnderTest) -> tuple[MessageBus, MessageBus]:
    one, two = (MessageBus(bus.client(), Subjects("test")) for _ in range(2))
    await one.transport.connect()
    await two.transport.connect()
    return one, two


async def test_one_subject_carries_a_union_of_kinds(bus: BusUnderTest) -> None:
    asker, server = await pair(bus)

    def answer(message: Job | Abort, reply: Reply) -> None:
        reply(Accepted() if isinstance(message, Job) else Refused("aborted", message.reason))

    await server.subscribe("work", answer, Job, Abort)
    assert await asker.request("work", job(3), Accepted, Refused, timeout_s=5) == Accepted()
    refusal = await asker.request("work", Abort(KEY, 1.0, "client"), Accepted, Refused, timeout_s=5)
    assert refusal == Refused("aborted", "client")


async def test_an_answer_may_come_later(bus: BusUnderTest) -> None:
    asker, server = await pair(bus)

    def answer_soon(_message: Job, reply: Reply) -> None:
        asyncio.get_running_loop().call_later(0.02, reply, Accepted())

    await server.subscribe("work", answer_soon, Job)
    assert await asker.request("work", job(1), Accepted, timeout_s=5) == Accepted()


@pytest.mark.parametrize("num_tokens", [700, 900, 20_000])
async def test_a_long_prompt_travels_in_parts(bus: BusUnderTest, num_tokens: int) -> None:
    asker, server = await pair(bus)
    got: Collector[Job] = Collector()

    def take(message: Job, reply: Reply) -> None:
        got.add(message)
        reply(Accepted())

    await server.subscribe("work", take, Job)
    assert await asker.request("work", job(num_tokens), Accepted, Refused, timeout_s=5) == Accepted()
    assert got.items == [job(num_tokens)]


async def test_parts_of_several_messages_do_not_mix(bus: BusUnderTest) -> None:
    asker, server = await pair(bus)
    got: Collector[Job] = Collector()

    def take(message: Job, reply: Reply) -> None:
        got.add(message)
        reply(Accepted())

    await server.subscribe("work", take, Job)
    jobs = [job(3000 + n, f"r{n}") for n in range(8)]
    await asyncio.gather(*(asker.request("work", one, Accepted, timeout_s=5) for one in jobs))
    assert sorted(got.items, key=lambda one: one.key) == jobs


async def test_parts_to_nobody_have_no_responders(bus: BusUnderTest) -> None:
    asker, _ = await pair(bus)
    with pytest.raises(NoResponders):
        await asker.request("nobody", job(5000), Accepted, timeout_s=5)


async def test_a_long_publish_is_refused(bus: BusUnderTest) -> None:
    asker, _ = await pair(bus)
    with pytest.raises(PayloadTooLarge):
        asker.publish("work", job(MAX_PAYLOAD))


async def test_bad_payloads_are_counted_and_stop_nobody(bus: BusUnderTest) -> None:
    asker, server = await pair(bus)
    await server.subscribe("work", lambda _message, reply: reply(Accepted()), Job)
    for payload in (
        b"",
        b"{",
        b"[]",
        b"part",
        b"part {}",
        b"part {}\n",
        b'{"kind": "nonsense"}',
        b"\xff\xfe",
    ):
        asker.transport.publish("work", payload)
    asker.publish("work", Abort(KEY, 1.0, "client"))
    assert await asker.request("work", job(1), Accepted, timeout_s=5) == Accepted()
    assert server.num_invalid == 9


async def test_metrics_tell_whether_the_bus_is_usable_and_what_made_no_sense(bus: BusUnderTest) -> None:
    asker, server = await pair(bus)
    metrics = RouterMetrics("r1")
    server.report_to(metrics)
    await server.subscribe("work", lambda _message, reply: reply(Accepted()), Job)
    asker.transport.publish("work", b"nonsense")
    assert await asker.request("work", job(1), Accepted, timeout_s=5) == Accepted()
    exposition = metrics.exposition().decode()
    assert 'galley_messages_invalid_total{instance="r1",role="router"} 1.0' in exposition
    assert 'galley_control_connected{instance="r1",role="router"} 1.0' in exposition


async def test_a_failing_handler_is_counted_and_stops_nobody(bus: BusUnderTest) -> None:
    asker, server = await pair(bus)

    def fail_on_short(message: Job, reply: Reply) -> None:
        if len(message.prompt_ids) < 2:
            raise ZeroDivisionError
        reply(Accepted())

    await server.subscribe("work", fail_on_short, Job)
    with pytest.raises(ControlTimeout):
        await asker.request("work", job(1), Accepted, timeout_s=0.1)
    assert await asker.request("work", job(2), Accepted, timeout_s=5) == Accepted()
    assert server.num_handler_errors == 1


async def test_an_answer_of_another_kind_is_invalid(bus: BusUnderTest) -> None:
    asker, server = await pair(bus)
    await server.subscribe("work", lambda _message, reply: reply(Accepted()), Job)
    with pytest.raises(MessageInvalid):
        await asker.request("work", job(1), Refused, timeout_s=5)
