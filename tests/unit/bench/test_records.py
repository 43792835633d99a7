"""A stream's events become the record that a client would write down; bytes become events."""

from collections.abc import AsyncIterator
from itertools import pairwise

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.records import RequestRecord, StreamLog
from bench.sse import MAX_LINE_BYTES, data_lines


def record_of(*events: tuple[float, object], done: bool = True) -> RequestRecord:
    log = StreamLog()
    for now, body in events:
        log.add(now, orjson.dumps(body))
    if done:
        log.add(9.0, b"[DONE]")
    return log.record(due=1.0, sent=1.25, ended=9.0, status=200)


def text(content: str, finish: str | None = None) -> dict[str, object]:
    return {"choices": [{"index": 0, "text": content, "finish_reason": finish}]}


def chat(content: str | None, finish: str | None = None) -> dict[str, object]:
    delta = {"role": "assistant"} if content is None else {"content": content}
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


USAGE = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 3}}


def test_times_count_from_when_the_request_was_due() -> None:
    record = record_of((2.0, text("a")), (2.5, text("b")), (4.0, text("c", "length")), (4.0, USAGE))
    assert record.ok
    assert record.ttft_s == 1.0
    assert record.itl_s == (0.5, 1.5)
    assert record.tpot_s == 1.0
    assert (record.prompt_tokens, record.output_tokens) == (5, 3)
    assert (record.text, record.finish_reason) == ("abc", "length")


def test_what_the_server_had_cached_is_kept_if_it_says_so() -> None:
    told = {"prompt_tokens": 5, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}
    assert record_of((2.0, text("a", "stop")), (2.0, {"choices": [], "usage": told})).cached_tokens == 4
    silent = told | {"prompt_tokens_details": None}
    assert record_of((2.0, text("a", "stop")), (2.0, {"choices": [], "usage": silent})).cached_tokens is None
    assert record_of((2.0, text("a", "stop")), (2.0, USAGE)).cached_tokens is None


def test_chat_chunks_count_alike_and_the_role_is_no_token() -> None:
    record = record_of(
        (1.5, chat(None)), (2.0, chat("a")), (3.0, chat("b")), (4.0, chat("", "stop")), (4.0, USAGE)
    )
    assert record.ttft_s == 1.0
    assert record.itl_s == (1.0,)
    assert record.tpot_s == 1.0


def test_the_servers_count_holds_when_two_tokens_came_as_one_text() -> None:
    record = record_of((2.0, text("a")), (4.0, text("bc", "length")), (4.0, USAGE))
    assert record.output_tokens == 3
    assert record.tpot_s == 1.0


def test_without_usage_texts_are_counted() -> None:
    record = record_of((2.0, text("a")), (3.0, text("b", "stop")))
    assert (record.output_tokens, record.tpot_s) == (2, 1.0)


def test_one_token_has_no_tpot() -> None:
    record = record_of((2.0, text("a", "length")))
    assert record.ok
    assert (record.tpot_s, record.itl_s) == (None, ())


def test_an_answer_without_text_still_has_a_first_token() -> None:
    assert record_of((3.0, text("", "stop")), (3.0, USAGE)).ttft_s == 2.0


def test_the_servers_own_timing_is_kept() -> None:
    record = record_of((2.0, text("a", "length")), (2.0, USAGE | {"galley": {"transfer_ms": 1.5, "by": "x"}}))
    assert record.timing == {"transfer_ms": 1.5}


@pytest.mark.parametrize(
    ("record", "error"),
    [
        (record_of((2.0, text("a", "stop")), done=False), "the stream ended without [DONE]"),
        (record_of((2.0, text("a"))), "the stream ended without a finish_reason"),
        (record_of((2.0, {"error": {"message": "worker lost"}})), "worker lost"),
        (record_of((2.0, ["not", "an", "event"])), "an event made no sense"),
    ],
)
def test_a_stream_that_does_not_end_well_is_an_error(record: RequestRecord, error: str) -> None:
    assert not record.ok
    assert error in record.error


async def chunks_of(data: bytes, cuts: list[int]) -> AsyncIterator[bytes]:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    for begin, end in pairwise(edges):
        yield data[begin:end]


@given(st.lists(st.text()), st.lists(st.integers(0, 10_000)), st.sampled_from([b"\n\n", b"\r\n\r\n"]))
async def test_lines_come_whole_wherever_the_network_cuts(
    texts: list[str], cuts: list[int], end: bytes
) -> None:
    data = b": a comment" + end + b"".join(b"data: " + orjson.dumps(text) + end for text in texts)
    lines = [orjson.loads(line) async for line in data_lines(chunks_of(data, cuts))]
    assert lines == texts


async def test_a_line_that_never_ends_is_refused() -> None:
    with pytest.raises(ValueError):
        [line async for line in data_lines(chunks_of(b"data: " + b"x" * MAX_LINE_BYTES, []))]
