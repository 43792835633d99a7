"""What a stream's bytes say of its request: times from when it was due, and answers that are not as asked."""

import orjson
import pytest

from bench.goodput.load import record_of
from bench.records import RequestRecord
from bench.stream_load import RawStream
from bench.workloads import RequestSpec

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
SPEC = RequestSpec((1, 2, 3), 3)
BEGAN = 1_700_000_000.0


def chunk(*events: object) -> bytes:
    data = b"".join(
        b"data: %b\n\n" % (event if isinstance(event, bytes) else orjson.dumps(event)) for event in events
    )
    return b"%x\r\n%b\r\n" % (len(data), data)


def token(text: str, finish: str | None = None) -> dict[str, object]:
    return {"id": "cmpl-1", "choices": [{"index": 0, "text": text, "finish_reason": finish}]}


USAGE = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 3}}
END = b"0\r\n\r\n"


def record(*pieces: tuple[float, bytes], error: str = "") -> RequestRecord:
    stream = RawStream(len, lambda: None)
    for at, data in pieces:
        stream.received(data, BEGAN + at)
    return record_of(stream, SPEC, due=1.0, sent=1.2, began=BEGAN, error=error)


async def test_times_count_from_when_the_request_was_due() -> None:
    found = record(
        (1.5, HEAD + chunk(token("a"))),
        (1.6, chunk(token("b"))),
        (1.9, chunk(token("c", "length"))),
        (1.9, chunk(USAGE, b"[DONE]") + END),
    )
    assert found.ok
    assert found.ttft_s == pytest.approx(0.5)
    assert found.tpot_s == pytest.approx(0.2)
    assert found.itl_s == pytest.approx((0.1, 0.3))
    assert (found.prompt_tokens, found.output_tokens, found.finish_reason) == (3, 3, "length")


async def test_a_short_answer_is_an_error() -> None:
    usage = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}
    found = record((1.5, HEAD + chunk(token("a"), token("b", "stop"), usage, b"[DONE]") + END))
    assert found.error == "2 of 3 tokens came"


async def test_a_stream_that_breaks_off_and_one_given_up_are_errors() -> None:
    begun = (1.5, HEAD + chunk(token("a")))
    assert "without [DONE]" in record(begun).error
    assert record(begun, error="given up").error == "given up"


async def test_a_refusal_says_what_the_server_said() -> None:
    body = orjson.dumps({"error": {"message": "too many requests"}})
    found = record((1.1, b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 9\r\n\r\n" + body))
    assert (found.status, found.error, found.ttft_s) == (429, "429: too many requests", None)
    assert record((1.1, b"HTTP/1.1 500 X\r\n\r\nno json")).error == "500: no json"
    assert record().error == "no answer"
