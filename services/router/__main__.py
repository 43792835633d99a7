"""`python -m services.router`: the router as a process."""

import sys

from aiohttp import web

from common.config import RouterSettings, load
from common.messages.subjects import Subjects
from common.observability.http import add_probes, json_response, serve_http
from common.observability.metrics import RouterMetrics
from common.runtime.bus import MessageBus
from common.runtime.service import ServiceContext, run_service
from common.transport.nats import NatsTransport
from services.router.service import RouterService


async def serve(settings: RouterSettings, context: ServiceContext) -> None:
    """HTTP first, so that probes answer while NATS is still being waited for."""
    metrics = RouterMetrics(settings.instance)
    bus = MessageBus(NatsTransport(settings.nats_url, name=settings.instance), Subjects(settings.cluster))
    app = web.Application()
    router: RouterService | None = None

    async def instances(_: web.Request) -> web.Response:
        return json_response({"instances": router.fleet() if router else []})

    app.router.add_get("/instances", instances)
    add_probes(app, metrics, lambda: router.why_not_ready() if router else "starting")
    http = await serve_http(app, settings.host, settings.port)
    try:
        router = RouterService(
            bus=bus,
            clock=context.clock,
            settings=settings,
            ref=context.ref,
            metrics=metrics,
            http_url=http.url(settings.reachable_host),
        )
        context.announce(http.url(settings.reachable_host))
        if await bus.connect(context.stopping):
            await router.run(context.stopping)
    finally:
        await bus.close()
        await http.close()


def main() -> None:
    settings = load(RouterSettings, sys.argv[1:])
    run_service(settings, lambda context: serve(settings, context))


if __name__ == "__main__":
    main()
