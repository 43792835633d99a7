"""Every answer is JSON, every failure an OpenAI-shaped error, every response carries X-Request-Id.

That holds for bytes that are no HTTP request, too (`refuse_requests`).

Knows nothing of what handlers do.
"""

import asyncio
import re

import orjson
import structlog
from aiohttp import HttpVersion11, web
from aiohttp.typedefs import Handler, Middleware

from common.errors import (
    BodyTooLarge,
    GalleyError,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    UnsupportedMediaType,
)
from common.ids import IdSource
from common.observability.http import Refuse
from services.gateway.http.edge import check_depth
from services.gateway.openai.answers import error_body, error_headers

LABEL = web.RequestKey("client_id", str)
"""The client's own X-Request-Id, or one that we drew: a label for logs and the response."""

_LABEL = re.compile(r"[\x21-\x7e]{1,128}")
_DUMP = re.compile(r"[\s:]*(bytearray\(|bytes: *)?b['\"].*", re.DOTALL)
"""What aiohttp adds to a reason: the bytes themselves, which may be a key."""

BODY_TIMEOUT_S = 60.0
"""How long a client may take to send its body."""

INLINE_BYTES = 128 * 1024
"""Bodies up to this are checked and parsed on the event loop; longer ones would hold it for too long."""

log = structlog.get_logger()


def label_requests(ids: IdSource) -> Middleware:
    """The middleware that labels requests and turns exceptions into JSON errors."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("X-Request-Id", "")
        label = request[LABEL] = given if _LABEL.fullmatch(given) else ids.hex(12)
        try:
            response = await handler(request)
        except web.HTTPException as error:
            response = error_response(_of_http(error, request))
            if "Allow" in error.headers:
                response.headers["Allow"] = error.headers["Allow"]
        except GalleyError as error:
            response = error_response(error)
        except Exception:
            log.exception("handler failed", path=request.path, client_id=label)
            response = error_response(GalleyError("something went wrong inside the gateway"))
        if not response.prepared:
            response.headers["X-Request-Id"] = label
        if request.content.exception() is not None:
            response.force_close()  # where the next request would begin is not known
        return response

    return middleware


def refuse_requests(ids: IdSource) -> Refuse:
    """Answers in the same form to what never becomes a request: broken or oversized lines and headers."""

    def refuse(_status: int, reason: str) -> web.Response:
        reason = " ".join(_DUMP.sub("", reason).split())[:200]
        response = error_response(InvalidRequest(f"this is no HTTP request that can be read: {reason}"))
        response.headers["X-Request-Id"] = ids.hex(12)
        return response

    return refuse


async def expect(request: web.Request) -> None:
    """For clients that ask before they send a body. aiohttp's own answers other wishes with a plain 417."""
    if request.headers["Expect"].strip().lower() == "100-continue" and request.version >= HttpVersion11:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # what follows is the beginning


def error_response(error: GalleyError) -> web.Response:
    return web.Response(
        body=orjson.dumps(error_body(error)),
        status=error.status,
        headers=error_headers(error),
        content_type="application/json",
    )


async def read_body(request: web.Request) -> bytes:
    """The body of a JSON request. Raises UnsupportedMediaType, InvalidRequest, BodyTooLarge."""
    kind = request.content_type
    given = "Content-Type" in request.headers
    if given and kind != "application/json" and not kind.endswith("+json"):
        raise UnsupportedMediaType(f"send application/json, not {kind}")
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            body = await request.read()
    except (web.HTTPException, ConnectionError):
        raise
    except TimeoutError:
        raise InvalidRequest(f"the body did not arrive within {BODY_TIMEOUT_S:g} s") from None
    except Exception as error:  # broken chunks or a broken Content-Encoding
        request.content.feed_eof()  # else aiohttp goes on reading, and fails
        raise InvalidRequest(f"the body cannot be read: {error}") from error
    if len(body) <= INLINE_BYTES:
        check_depth(body)
    else:
        await asyncio.to_thread(check_depth, body)
    return body


def _of_http(error: web.HTTPException, request: web.Request) -> GalleyError:
    match error.status:
        case 404:
            return NotFound(f"there is nothing at {request.path}")
        case 405:
            return MethodNotAllowed(f"{request.path} does not take {request.method}")
        case 413:
            return BodyTooLarge(f"the body is too large: {error.text}")
        case _:
            return InvalidRequest(error.reason) if error.status < 500 else GalleyError(error.reason)
