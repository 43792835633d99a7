"""The aiohttp application: the OpenAI endpoints and the probes, behind one middleware."""

from aiohttp import web

from common.clock import Clock
from common.observability.http import add_probes
from services.gateway.gateway import Gateway
from services.gateway.http.api import OpenAIApi
from services.gateway.http.middleware import label_requests
from services.gateway.tokenizing import TokenizerPool


def make_app(
    gateway: Gateway, tokenizers: TokenizerPool, clock: Clock, *, max_body_bytes: int
) -> web.Application:
    app = web.Application(client_max_size=max_body_bytes, middlewares=[label_requests(gateway.ids)])
    app.add_routes(OpenAIApi(gateway, tokenizers, clock).routes())
    add_probes(app, gateway.metrics, gateway.why_not_ready)
    return app
