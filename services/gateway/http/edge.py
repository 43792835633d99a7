"""What stands between the world and the endpoints: API keys, CORS, TLS, and how deep JSON may be nested.

Knows nothing of what endpoints do.
"""

import re
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from common.errors import ConfigError, InvalidRequest, Unauthorized
from services.gateway.http.keys import KeyRing

MAX_JSON_DEPTH = 100
OPEN_PATHS = frozenset({"/healthz", "/readyz", "/health", "/metrics", "/openapi.json"})
"""Told to everybody: probes and scrapers have no key."""

_PREFLIGHT_AGE_S = "600"
_EXPOSED = "X-Request-Id, Retry-After"
_OnPrepare = Callable[[web.Request, web.StreamResponse], Awaitable[None]]
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"?', re.DOTALL)
"""The closing quote may be missing: else each quote in what is no JSON would be looked for up to the end."""
_PIECE = re.compile(rb'[^"]*+(?:"(?:[^"\\]|\\.)*+"?[^"]*+){0,1000}+', re.DOTALL)
"""Some strings and what is around them: more at a time would keep other threads waiting."""
_AS_ARRAYS = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def guard(app: web.Application, keys: KeyRing | None, cors_origins: frozenset[str]) -> None:
    """Ask for a key if there are `keys`, and let pages of `cors_origins` ("*" is all) use the endpoints.

    To be called before the app runs; errors are left to the middleware that is there already.
    """
    if cors_origins:
        app.middlewares.append(_answer_preflights(cors_origins))
        app.on_response_prepare.append(_allow_origins(cors_origins))
    if keys is not None:
        app.middlewares.append(_ask_for_key(keys))


def tls_context(certificate: Path | None, key: Path | None) -> ssl.SSLContext | None:
    """None without a certificate. `key` None: it is in the certificate's file. Raises ConfigError."""
    if certificate is None:
        if key is not None:
            raise ConfigError("tls_key is set, but no tls_cert", param="tls_key")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key, password="")  # an encrypted key must not ask on a terminal
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise ConfigError(f"tls_cert {certificate}: {error}", param="tls_cert") from error
    return context


def check_depth(body: bytes) -> None:
    """Raises InvalidRequest for JSON nested deeper than MAX_JSON_DEPTH; what is no JSON may pass.

    A loop over single brackets would take ten seconds for 16 MiB of them.
    """
    if body.count(b"[") + body.count(b"{") <= MAX_JSON_DEPTH:
        return
    pieces = (_STRING.sub(b"", piece[0]) for piece in _PIECE.finditer(body))
    levels = b"".join(piece.translate(_AS_ARRAYS, delete=_NO_BRACKETS) for piece in pieces)
    depth = 0
    while depth <= MAX_JSON_DEPTH and b"[]" in levels:
        levels = levels.replace(b"[]", b"")  # the innermost level
        depth += 1
    if depth + levels.count(b"[") > MAX_JSON_DEPTH:
        raise InvalidRequest(f"the body is nested more than {MAX_JSON_DEPTH} levels deep")


def _ask_for_key(keys: KeyRing) -> Middleware:
    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path not in OPEN_PATHS:
            scheme, _, key = request.headers.get("Authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not key.strip():
                raise Unauthorized("send an API key: Authorization: Bearer KEY")
            if not keys.knows(key.strip()):
                raise Unauthorized("the API key is wrong")
        return await handler(request)

    return middleware


def _answer_preflights(origins: frozenset[str]) -> Middleware:
    """Browsers ask with OPTIONS first, and without a key."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        asked = request.headers.get("Access-Control-Request-Method")
        if request.method != "OPTIONS" or asked is None or _allowed(request, origins) is None:
            return await handler(request)
        headers = {
            "Access-Control-Allow-Methods": "GET, POST",
            "Access-Control-Allow-Headers": request.headers.get("Access-Control-Request-Headers", ""),
            "Access-Control-Max-Age": _PREFLIGHT_AGE_S,
        }
        return web.Response(status=204, headers=headers)

    return middleware


def _allow_origins(origins: frozenset[str]) -> _OnPrepare:
    async def on_prepare(request: web.Request, response: web.StreamResponse) -> None:
        response.headers.add("Vary", "Origin")
        if (origin := _allowed(request, origins)) is not None:
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Access-Control-Expose-Headers"] = _EXPOSED

    return on_prepare


def _allowed(request: web.Request, origins: frozenset[str]) -> str | None:
    """What to allow the page that asks, if it may."""
    origin = request.headers.get("Origin", "")
    if "*" in origins:
        return "*" if origin else None
    return origin if origin in origins else None
