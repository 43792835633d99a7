"""The load client in virtual time: every figure is known exactly."""

import asyncio
from collections.abc import Awaitable, Callable

import httpx
import pytest

from bench.client import LoadClient, ServerRefused, closed_loop, open_client, open_loop
from bench.records import RequestRecord
from bench.workloads import RequestSpec, fixed, requests
from tests.support.virtual_loop import run_virtual
from tests.unit.bench.fake_server import MODEL, FakeServer

SPECS = requests(6, fixed(3), fixed(4), seed=0)
Load = Callable[[LoadClient], Awaitable[list[RequestRecord]]]


def under(server: FakeServer, load: Load) -> list[RequestRecord]:
    async def main() -> list[RequestRecord]:
        clock = asyncio.get_running_loop().time
        async with open_client("http://fake", transport=server.transport(), clock=clock) as client:
            return await load(client)

    return run_virtual(main())


def test_a_streamed_request_is_timed_as_it_was_served() -> None:
    server = FakeServer(first_s=0.5, gap_s=0.1, tokens=4)
    [record] = under(server, lambda client: closed_loop(client, SPECS[:1], 1))
    assert record.ok
    assert record.ttft_s == pytest.approx(0.5)
    assert record.itl_s == pytest.approx([0.1] * 3)
    assert record.tpot_s == pytest.approx(0.1)
    assert (record.output_tokens, record.finish_reason, record.text) == (4, "length", "t0 t1 t2 t3 ")
    assert record.ended == pytest.approx(0.8)


def test_the_request_says_what_the_spec_says() -> None:
    server = FakeServer()
    under(server, lambda client: closed_loop(client, [RequestSpec("hi", 7, seed=3)], 1))
    assert server.bodies == [
        {
            "model": MODEL,
            "prompt": "hi",
            "max_tokens": 7,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "seed": 3,
        }
    ]


def test_a_closed_loop_keeps_so_many_running_and_no_more() -> None:
    server, seen = FakeServer(), list[RequestRecord]()
    records = under(server, lambda client: closed_loop(client, SPECS, 2, seen.append))
    assert server.most_running == 2
    assert sorted(record.sent for record in records) == pytest.approx([0, 0, 0.8, 0.8, 1.6, 1.6])
    assert len(seen) == len(records) == 6
    assert [body["prompt"] for body in server.bodies] == [list(spec.prompt) for spec in SPECS]


def test_an_open_loop_sends_on_time_however_slow_the_server_is() -> None:
    server = FakeServer(first_s=60.0)
    times = [0.1, 0.2, 0.2, 0.9, 1.5, 2.0]
    records = under(server, lambda client: open_loop(client, SPECS, times))
    assert [record.due for record in records] == times
    assert [record.sent for record in records] == pytest.approx(times)
    assert [record.ttft_s for record in records] == pytest.approx([60.0] * 6)
    assert server.most_running == 6


def test_refused_and_broken_requests_are_errors_and_the_others_go_on() -> None:
    server = FakeServer(refuse=frozenset({1}), cut=frozenset({2}))
    records = under(server, lambda client: closed_loop(client, SPECS, 1))
    assert [record.ok for record in records] == [True, False, False, True, True, True]
    assert records[1].error == "503: no decode instance"
    assert (records[1].status, records[1].ttft_s) == (503, None)
    assert records[2].error == "the stream ended without [DONE]"


def test_who_leaves_keeps_what_came_until_then() -> None:
    server = FakeServer(first_s=0.5, gap_s=0.1, tokens=100)

    async def load(client: LoadClient) -> list[RequestRecord]:
        return [await client.stream(SPECS[0], began=client.clock(), leave=1.0)]

    [record] = under(server, load)
    assert record.ok
    assert record.ended == pytest.approx(1.0)
    assert record.finish_reason == "left"
    assert len(record.itl_s) == 5
    assert server.running == 0


def test_a_connection_that_fails_is_an_error_of_its_request() -> None:
    def handle(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        raise httpx.ConnectError("refused")

    async def main() -> list[RequestRecord]:
        async with open_client("http://fake", transport=httpx.MockTransport(handle)) as client:
            return await closed_loop(client, SPECS[:1], 1)

    [record] = run_virtual(main())
    assert record.error == "ConnectError: refused"


@pytest.mark.parametrize("answer", [httpx.Response(404), httpx.Response(200, json={"data": []})])
def test_a_server_without_models_is_refused(answer: httpx.Response) -> None:
    async def main() -> None:
        async with open_client("http://fake", transport=httpx.MockTransport(lambda _: answer)):
            raise AssertionError("there is no model to measure")

    with pytest.raises(ServerRefused):
        run_virtual(main())
