"""Which workers are measured: those of the router that knows the gateway, or none."""

import httpx
import pytest

from bench.target import Target, find_target

FLEET = {
    "instances": [
        {"role": "gateway", "http_url": "http://127.0.0.1:8000", "state": "alive"},
        {"role": "router", "http_url": "http://127.0.0.1:8001", "state": "alive"},
        {"role": "prefill", "http_url": "http://127.0.0.1:41001", "state": "alive"},
        {"role": "decode", "http_url": "http://127.0.0.1:41002", "state": "alive"},
        {"role": "decode", "http_url": "http://127.0.0.1:41003", "state": "dead"},
    ]
}
WORKERS = ("http://127.0.0.1:41001", "http://127.0.0.1:41002")


def router_at(url: str, answer: httpx.Response) -> httpx.MockTransport:
    def handle(request: httpx.Request) -> httpx.Response:
        if str(request.url) != f"{url}/instances":
            raise httpx.ConnectError("nobody listens")
        return answer

    return httpx.MockTransport(handle)


async def test_the_workers_are_those_that_the_router_lists() -> None:
    transport = router_at("http://localhost:8001", httpx.Response(200, json=FLEET))
    found = await find_target("http://localhost:8000", transport=transport)
    assert found == Target("http://localhost:8000", WORKERS)


async def test_a_router_that_was_named_is_believed() -> None:
    transport = router_at("http://elsewhere:9", httpx.Response(200, json=FLEET))
    found = await find_target("http://front.example", "http://elsewhere:9", transport=transport)
    assert found.workers == WORKERS


@pytest.mark.parametrize(
    "answer",
    [
        httpx.Response(200, json=FLEET),
        httpx.Response(404),
        httpx.Response(200, text="<html>"),
        httpx.Response(200, json=[]),
        httpx.Response(200, json={"instances": [{}]}),
    ],
)
async def test_without_a_router_that_knows_the_gateway_no_workers_are_measured(
    answer: httpx.Response,
) -> None:
    transport = router_at("http://localhost:8001", answer)
    assert await find_target("http://localhost:7777", transport=transport) == Target("http://localhost:7777")


async def test_nobody_on_the_routers_port_is_no_error() -> None:
    transport = router_at("http://other:1", httpx.Response(404))
    assert await find_target("http://localhost:8000", transport=transport) == Target("http://localhost:8000")
