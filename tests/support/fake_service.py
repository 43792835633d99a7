"""A service that does nothing, for tests of launchers: `python -m tests.support.fake_service ROLE ...`.

How the gateway misbehaves is its served model name: "dies", "never_ready" or "ignores_sigterm".
"""

import asyncio
import sys

from aiohttp import web

from common.config import SERVICES, GatewaySettings, ServiceSettings, load
from common.errors import UnsupportedModel
from common.messages.cluster import Role
from common.observability.http import add_probes, serve_http
from common.observability.metrics import ServiceMetrics
from common.runtime.service import ServiceContext, run_service


async def serve(settings: ServiceSettings, context: ServiceContext) -> None:
    manner = settings.served_model_name if isinstance(settings, GatewaySettings) else ""
    if manner == "dies":
        raise UnsupportedModel("no such architecture: Mamba")
    app = web.Application()
    reason = "weights are being loaded" if manner == "never_ready" else ""
    add_probes(app, ServiceMetrics(settings.instance, settings.role), lambda: reason)
    http = await serve_http(app, settings.host, settings.port)
    context.announce(http.url())
    await context.stopping.wait()
    if manner == "ignores_sigterm":
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                continue
    await http.close()


def main() -> None:
    role: Role = next(role for role in SERVICES if role == sys.argv[1])
    settings = load(SERVICES[role], sys.argv[2:])
    run_service(settings, lambda context: serve(settings, context))


if __name__ == "__main__":
    main()
