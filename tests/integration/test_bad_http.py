"""Bytes that are no HTTP request, over raw sockets: an error in OpenAI's shape, and nobody else notices."""

import asyncio
import json
from typing import Any

import pytest

from common.observability.http import MAX_HEADER_BYTES, MAX_HEADERS
from tests.support.http_stage import Stage, error_of

BODY = b'{"model": "tiny", "prompt": "abc", "max_tokens": 3}'
LENGTH = b"Content-Length: %d" % len(BODY)
CHUNKED = b"Transfer-Encoding: chunked"


def ask(
    *headers: bytes,
    line: bytes = b"POST /v1/completions HTTP/1.1",
    host: bytes = b"Host: x",
    body: bytes = BODY,
) -> bytes:
    """A request with these headers; without a word on its length unless they have one."""
    return b"\r\n".join([line, *([host] if host else []), *headers, b"", body])


NO_REQUESTS = {
    "words": b"hello\r\n\r\n",
    "a TLS hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(40),
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP/9.9": ask(LENGTH, line=b"POST /v1/completions HTTP/9.9"),
    "an unknown method": ask(LENGTH, line=b"WIBBLE /v1/completions HTTP/1.1"),
    "a raw letter in the path": ask(LENGTH, line="POST /v1/é HTTP/1.1".encode()),
    "a broken URL": ask(LENGTH, line=b"POST http://[::1 HTTP/1.1"),
    "a long line": ask(LENGTH, line=b"POST /" + b"a" * (MAX_HEADER_BYTES + 1) + b" HTTP/1.1"),
    "a long header": ask(LENGTH, b"X-A: " + b"a" * (MAX_HEADER_BYTES + 1)),
    "many headers": ask(LENGTH, *(b"X-%d: a" % number for number in range(MAX_HEADERS + 1))),
    "a header with a space": ask(LENGTH, b"X A: b"),
    "a header without a colon": ask(LENGTH, b"Nonsense"),
    "a key with a NUL": ask(LENGTH, b"Authorization: Bearer sk-secret\x00"),
    "no host": ask(LENGTH, host=b""),
    "two hosts": ask(LENGTH, b"Host: y"),
    "a length in words": ask(b"Content-Length: ten"),
    "a negative length": ask(b"Content-Length: -5"),
    "a length beyond all numbers": ask(b"Content-Length: " + b"9" * 30),
    "two lengths": ask(LENGTH, b"Content-Length: 47"),
    "a length and chunks": ask(LENGTH, CHUNKED),
    "an unknown transfer encoding": ask(b"Transfer-Encoding: wibble"),
    "a chunk's size in letters": ask(CHUNKED, body=b"zz\r\n{}\r\n0\r\n\r\n"),
    "a chunk longer than its size": ask(CHUNKED, body=b"2\r\n{}abc\r\n0\r\n\r\n"),
    "bare line feeds": ask(LENGTH).replace(b"\r\n", b"\n"),
}

REQUESTS = {
    "chunks": ask(CHUNKED, body=b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)),
    "an empty line ahead": b"\r\n" + ask(LENGTH),
    "a whole URL": ask(LENGTH, line=b"POST http://x/v1/completions HTTP/1.1"),
    "HTTP/1.0 without a host": ask(LENGTH, line=b"POST /v1/completions HTTP/1.0", host=b""),
    "an offer of HTTP/2": ask(
        LENGTH, b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAEAAEAAAAIAAAAA"
    ),
    "an unknown expectation": ask(LENGTH, b"Expect: wibble"),
}
"""Odd, but sent by some client or allowed by HTTP."""


async def talk(stage: Stage, data: bytes) -> tuple[int, dict[str, str], Any, bytes]:
    """Status, headers and JSON of the first answer, and what follows an error."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(stage.url.rsplit(":", 1)[1]))
    try:
        async with asyncio.timeout(10):
            writer.write(data)
            status, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")[:-2]
            headers = dict(line.split(": ", 1) for line in lines)
            body = json.loads(await reader.readexactly(int(headers.get("Content-Length", 0))) or b"null")
            rest = await reader.read() if status.split()[1] == "400" else b""
    finally:
        writer.close()
    return int(status.split()[1]), headers, body, rest


@pytest.mark.parametrize("name", NO_REQUESTS)
async def test_what_is_no_request_gets_an_error_that_clients_understand(stage: Stage, name: str) -> None:
    status, headers, body, rest = await talk(stage, NO_REQUESTS[name])
    error = error_of((status, body), 400)
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_request")
    assert headers["Content-Type"] == "application/json"
    assert headers["X-Request-Id"]
    assert rest == b""  # the connection is closed: where the next request would begin is not known
    assert len(error["message"]) < 200
    assert "sk-secret" not in error["message"]
    assert (await stage.complete())[0] == 200
    assert stage.script.jobs[:-1] == []


@pytest.mark.parametrize("name", REQUESTS)
async def test_odd_requests_are_requests(stage: Stage, name: str) -> None:
    status, headers, body, _ = await talk(stage, REQUESTS[name])
    assert (status, body["choices"][0]["text"]) == (200, "Hel")
    assert headers["X-Request-Id"]


async def test_a_client_that_asks_before_it_sends_is_told_to_go_on(stage: Stage) -> None:
    status, headers, body, _ = await talk(stage, ask(LENGTH, b"Expect: 100-continue", body=b""))
    assert (status, headers, body) == (100, {}, None)
