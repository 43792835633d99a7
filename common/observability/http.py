"""HTTP for every service: the probes `/healthz`, `/readyz`, `/metrics`, and a server with an owner.

A service that has more to say adds routes to the app first. Knows nothing of what makes a service ready:
it is told by a function.
"""

import asyncio
import errno
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import orjson
from aiohttp import web

from common.errors import ConfigError
from common.observability.metrics import CONTENT_TYPE, ServiceMetrics

MAX_HEADERS = 64
MAX_HEADER_BYTES = 8190
_CONNECTION: Final[dict[str, Any]] = {
    "access_log": None,
    "max_headers": MAX_HEADERS,
    "max_line_size": MAX_HEADER_BYTES,
    "max_field_size": MAX_HEADER_BYTES,
}

WhyNotReady = Callable[[], str]
"""Says in a few words what a request would still have to wait for; "" when one can be served."""

Refuse = Callable[[int, str], web.Response]
"""The answer, by status and reason, to bytes that are no HTTP request: such never come to a handler."""


Details = Callable[[], dict[str, str]]
"""What a service tells of itself in `/readyz`, besides that it is ready."""


def add_probes(
    app: web.Application,
    metrics: ServiceMetrics,
    why_not_ready: WhyNotReady,
    details: Details = dict,
) -> None:
    """Add `/healthz` (200 while alive), `/readyz` (200, or 503 with the reason) and `/metrics`.

    `/health` is `/readyz` by the name that other servers gave it: load clients ask for it before they begin.
    """

    async def healthz(_: web.Request) -> web.Response:
        return json_response({"status": "alive"})

    async def readyz(_: web.Request) -> web.Response:
        reason = why_not_ready()
        if reason:
            return json_response({"status": "not ready", "reason": reason}, status=503)
        return json_response({"status": "ready", **details()})

    async def exposition(_: web.Request) -> web.Response:
        return web.Response(body=metrics.exposition(), headers={"Content-Type": CONTENT_TYPE})

    app.add_routes(
        [
            web.get("/healthz", healthz),
            web.get("/readyz", readyz),
            web.get("/health", readyz),
            web.get("/metrics", exposition),
        ]
    )


def json_response(body: object, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json")


@dataclass(frozen=True, slots=True)
class HttpServer:
    """A listening server. `port` is the real one, also when 0 was asked for."""

    runner: web.AppRunner
    listening: asyncio.Server
    host: str
    port: int
    scheme: str = "http"

    def url(self, host: str = "") -> str:
        """`http://HOST:PORT` (https with TLS), by another name of this host if given."""
        name = host or self.host
        return (
            f"{self.scheme}://[{name}]:{self.port}" if ":" in name else f"{self.scheme}://{name}:{self.port}"
        )

    async def close(self) -> None:
        """Stop accepting, end what is still running, free the port. Idempotent."""
        self.listening.close()
        await self.runner.cleanup()


class _Connection(web.RequestHandler):
    """aiohttp's own, but for what it says of bytes that are no request."""

    __slots__ = ("_refuse",)

    def __init__(self, server: web.Server, refuse: Refuse | None) -> None:
        super().__init__(server, loop=asyncio.get_running_loop(), **_CONNECTION)
        self._refuse = refuse

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if self._refuse is None or status >= 500:
            return super().handle_error(request, status, exc, message)
        response = self._refuse(status, message or "")
        response.force_close()  # where the next request would begin is not known
        return response


async def serve_http(
    app: web.Application,
    host: str,
    port: int,
    *,
    shutdown_timeout_s: float = 0.5,
    tls: ssl.SSLContext | None = None,
    reuse_port: bool = False,
    refuse: Refuse | None = None,
) -> HttpServer:
    """Listen on `host`:`port` (0 takes a free one). Raises ConfigError when that cannot be had.

    `shutdown_timeout_s` is how long `close` waits for handlers; draining is the service's own business.
    A handler is cancelled when its client goes away. With `reuse_port` others may listen there as well. More
    than MAX_HEADERS headers, or one longer than MAX_HEADER_BYTES, are a 400, which `refuse` puts into words.
    """
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=shutdown_timeout_s)
    await runner.setup()
    server = runner.server
    assert server is not None
    try:
        listening = await asyncio.get_running_loop().create_server(
            lambda: _Connection(server, refuse), host, port, backlog=1024, ssl=tls, reuse_port=reuse_port
        )
    except OSError as error:
        await runner.cleanup()
        taken = error.errno == errno.EADDRINUSE
        reason = "another process listens there; give another port" if taken else error.strerror or str(error)
        raise ConfigError(f"cannot listen on {host}:{port}: {reason}", param="port") from error
    bound: int = listening.sockets[0].getsockname()[1]
    return HttpServer(runner, listening, host, bound, "https" if tls else "http")
