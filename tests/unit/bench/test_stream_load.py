"""What the load client makes of bytes, however the network cuts them."""

import asyncio

import orjson
import pytest

from bench.gateway_trial import PROMPT, check
from bench.stream_load import RawStream, StreamRecord, completion_request

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def event(text: str, **more: object) -> bytes:
    return b"data: " + orjson.dumps({"id": "cmpl-ab12", "choices": [{"text": text}]} | more) + b"\n\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


ANSWER = HEAD + chunk(event("one ") + event("two ")) + chunk(event("three")) + chunk(b"data: [DONE]\n\n")
END = b"0\r\n\r\n"


async def received(pieces: list[bytes]) -> RawStream:
    stream = RawStream(len, lambda: None)
    for number, piece in enumerate(pieces):
        stream.received(piece, float(number))
    return stream


@pytest.mark.parametrize("size", [1, 2, 7, 64, 10_000])
async def test_the_same_events_from_any_cut(size: int) -> None:
    raw = ANSWER + END
    stream = await received([raw[at : at + size] for at in range(0, len(raw), size)])
    record = StreamRecord.of(stream)
    assert (record.text, record.error, record.request) == ("one two three", "", "ab12")
    assert len(record.times) == 3
    assert stream.ended.done()


async def test_an_event_comes_with_its_last_byte() -> None:
    first, second = HEAD + chunk(event("one ")), chunk(event("two "))
    done = chunk(b"data: [DONE]\n\n") + END
    record = StreamRecord.of(await received([first, second[:20], second[20:], done]))
    assert record.times == (0.0, 2.0)


async def test_what_went_wrong_is_told() -> None:
    assert "broke off" in StreamRecord.of(await received([HEAD + chunk(event("one "))])).error
    assert "503" in StreamRecord.of(await received([b"HTTP/1.1 503 Bad\r\n\r\n{}"])).error
    failed = chunk(b'data: {"error":{"message":"it broke"}}\n\n')
    assert "it broke" in StreamRecord.of(await received([HEAD + failed + END])).error
    assert "answered" in StreamRecord.of(await received([])).error


def test_a_request_is_http() -> None:
    head, _, body = completion_request("http://h:1", "m", "hi", 7).partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/completions HTTP/1.1\r\nHost: h:1\r\n")
    assert f"Content-Length: {len(body)}".encode() in head
    assert orjson.loads(body)["max_tokens"] == 7


def test_wrong_texts_and_counts_are_noticed() -> None:
    good = StreamRecord("r", 0.0, (1.0, 2.0), PROMPT + PROMPT[:5])
    assert check([good], 2) == ()
    assert "of 3 events" in check([good], 3)[0]
    assert "text is wrong" in check([StreamRecord("r", 0.0, (1.0, 2.0), PROMPT[1:])], 2)[0]
    assert check([StreamRecord("r", 0.0, (), "", "it broke")] * 9, 2) == ("it broke",) * 3


async def test_a_stream_can_be_closed_at_any_time() -> None:
    stream = RawStream(len, lambda: None)
    stream.close()
    stream.close()
    stream.received(b"", 1.0)
    await asyncio.wait_for(stream.ended, 1)
