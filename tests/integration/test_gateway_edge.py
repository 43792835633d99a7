"""The gateway's edge over real sockets: keys, CORS, TLS, limits, and two servers on one port."""

import io
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from common.ids import SystemIds
from common.observability.http import MAX_HEADER_BYTES, MAX_HEADERS, HttpServer, json_response, serve_http
from deploy.local.readiness import probe
from services.gateway.http import sse
from services.gateway.http.edge import guard, tls_context
from services.gateway.http.keys import KeyRing, hash_line
from services.gateway.http.middleware import label_requests, read_body
from services.gateway.http.sse import DONE, EventStream, event
from tests.support.http_stage import error_of

CERTIFICATE = Path(__file__).parents[1] / "support" / "localhost.pem"
KEY = "sk-alice"
KEYS = KeyRing([hash_line(KEY).removeprefix("sha256:")])
PAGE = "https://app.example"


@asynccontextmanager
async def served(
    *,
    keys: KeyRing | None = None,
    origins: frozenset[str] = frozenset(),
    port: int = 0,
    says: str = "",
    tls: ssl.SSLContext | None = None,
    reuse_port: bool = False,
) -> AsyncIterator[HttpServer]:
    """An app with the gateway's middlewares around one endpoint that reads its body."""

    async def ask(request: web.Request) -> web.StreamResponse:
        return json_response({"bytes": len(await read_body(request)), "says": says})

    async def stream(request: web.Request) -> web.StreamResponse:
        events = EventStream(request, {})
        await events.begin()
        for number in range(3):
            await events.write([event({"number": number})])
        await events.end([DONE])
        return events.response

    app = web.Application(client_max_size=1 << 20, middlewares=[label_requests(SystemIds())])
    app.add_routes([web.post("/v1/ask", ask), web.post("/v1/stream", stream), web.get("/readyz", stream)])
    guard(app, keys, origins)
    server = await serve_http(app, "127.0.0.1", port, tls=tls, reuse_port=reuse_port)
    try:
        yield server
    finally:
        await server.close()


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.mark.parametrize(
    "sent", ["", "Bearer", "Bearer ", KEY, f"Basic {KEY}", "Bearer sk-bob", "Bearer \xff"]
)
async def test_without_a_right_key_nothing_is_answered(http: aiohttp.ClientSession, sent: str) -> None:
    async with served(keys=KEYS) as server:
        for path in ("/v1/ask", "/v1/nowhere"):
            async with http.post(server.url() + path, json={}, headers={"Authorization": sent}) as response:
                error = error_of((response.status, await response.json()), 401)
                assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
                assert response.headers["X-Request-Id"]
                assert KEY not in error["message"]


async def test_with_a_key_and_on_probes_all_is_answered(http: aiohttp.ClientSession) -> None:
    async with served(keys=KEYS) as server:
        headers = {"Authorization": f"bearer {KEY}"}
        async with http.post(f"{server.url()}/v1/ask", json={}, headers=headers) as response:
            assert response.status == 200
        async with http.get(f"{server.url()}/readyz") as response:
            assert response.status == 200


async def test_no_page_may_ask_unless_it_is_set(http: aiohttp.ClientSession) -> None:
    asks = {"Origin": PAGE, "Access-Control-Request-Method": "POST"}
    async with served() as server, http.options(f"{server.url()}/v1/ask", headers=asks) as response:
        assert response.status == 405
        assert not [name for name in response.headers if name.startswith("Access-Control")]
    async with (
        served(origins=frozenset({"https://other.example"})) as server,
        http.post(f"{server.url()}/v1/ask", json={}, headers=asks) as response,
    ):
        assert response.status == 200
        assert "Access-Control-Allow-Origin" not in response.headers
        assert response.headers["Vary"] == "Origin"


async def test_a_page_that_is_set_may_ask_and_stream(http: aiohttp.ClientSession) -> None:
    asks = {
        "Origin": PAGE,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    async with served(keys=KEYS, origins=frozenset({PAGE})) as server:
        async with http.options(f"{server.url()}/v1/stream", headers=asks) as response:
            assert response.status == 204  # without a key: browsers send none here
            assert response.headers["Access-Control-Allow-Origin"] == PAGE
            assert response.headers["Access-Control-Allow-Headers"] == "authorization,content-type"
            assert "POST" in response.headers["Access-Control-Allow-Methods"]
        headers = {"Origin": PAGE, "Authorization": f"Bearer {KEY}"}
        async with http.post(f"{server.url()}/v1/stream", headers=headers) as response:
            assert response.headers["Access-Control-Allow-Origin"] == PAGE
            assert "X-Request-Id" in response.headers["Access-Control-Expose-Headers"]
        async with http.post(f"{server.url()}/v1/ask", json={}, headers={"Origin": PAGE}) as response:
            assert response.status == 401
            assert response.headers["Access-Control-Allow-Origin"] == PAGE  # so that the page can read it


async def test_any_page_may_ask_with_a_star(http: aiohttp.ClientSession) -> None:
    async with (
        served(origins=frozenset({"*"})) as server,
        http.post(f"{server.url()}/v1/ask", json={}, headers={"Origin": PAGE}) as response,
    ):
        assert response.headers["Access-Control-Allow-Origin"] == "*"


async def test_bodies_and_headers_have_limits(http: aiohttp.ClientSession) -> None:
    async with served() as server:
        url = f"{server.url()}/v1/ask"
        async with http.post(url, data=b"[" * 101, headers={"Content-Type": "application/json"}) as response:
            assert "nested" in error_of((response.status, await response.json()), 400)["message"]
        large = io.BytesIO(b'"' + b"x" * (1 << 20) + b'"')
        async with http.post(url, data=large, headers={"Content-Type": "application/json"}) as response:
            error_of((response.status, await response.json()), 413)
        for headers in (
            {f"X-{number}": "1" for number in range(MAX_HEADERS + 1)},
            {"X-Long": "x" * (MAX_HEADER_BYTES + 1)},
        ):
            async with http.post(url, json={}, headers=headers) as response:
                assert response.status == 400
        async with http.post(url, json={}, headers={"X-Short": "x" * 4000}) as response:
            assert response.status == 200


async def test_tls_by_certificate(http: aiohttp.ClientSession) -> None:
    trusted = ssl.create_default_context(cafile=str(CERTIFICATE))
    async with served(tls=tls_context(CERTIFICATE, None)) as server:
        assert server.url().startswith("https://")
        async with http.post(f"{server.url()}/v1/ask", json={}, ssl=trusted) as response:
            assert response.status == 200
        assert await probe(http, server.url()) == ""
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await http.post(f"{server.url()}/v1/ask", json={})


async def test_events_come_to_the_end_over_tls(
    http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "STALL_S", 2.0)  # so that it fails soon
    trusted = ssl.create_default_context(cafile=str(CERTIFICATE))
    async with (
        served(tls=tls_context(CERTIFICATE, None)) as server,
        http.post(f"{server.url()}/v1/stream", ssl=trusted) as response,
    ):
        assert (await response.read()).endswith(b'data: {"number":2}\n\ndata: [DONE]\n\n')


async def test_servers_share_a_port_and_each_gets_connections() -> None:
    async with (
        served(says="one", reuse_port=True) as one,
        served(says="two", reuse_port=True, port=one.port) as two,
    ):
        assert one.port == two.port
        said = set()
        for _ in range(64):
            async with aiohttp.ClientSession() as http, http.post(f"{one.url()}/v1/ask", json={}) as response:
                said.add((await response.json())["says"])
        assert said == {"one", "two"}
