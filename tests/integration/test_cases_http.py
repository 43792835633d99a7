"""Cases A-D of docs/cases.md that a gateway decides by itself, over real HTTP."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from common.messages.generation import Rejected
from tests.support.http_stage import (
    FAMILY,
    Stage,
    error_of,
    make_vocabulary,
    open_stage,
    reasons_of,
    text_of,
)

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HI = [{"role": "user", "content": "Hi"}]
ALPHABET = " DEFGHIJKLMNOP"
BOTH = pytest.mark.parametrize("path", [CHAT, COMPLETIONS])

STRICT_TEMPLATE = (
    "{% for m in messages %}{% if (m.role == 'assistant') == (loop.index0 % 2 == 0) or m.role == 'system' %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.content }}{% endfor %}"
)


def question(path: str, **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", **({"messages": HI} if path == CHAT else {"prompt": "abc"}), **fields}


async def lives(stage: Stage) -> None:
    """The next request is served."""
    assert (await stage.complete(max_tokens=2))[0] == 200


def text_in(body: Any) -> str:
    choice = body["choices"][0]
    text: str = choice["message"]["content"] if "message" in choice else choice["text"]
    return text


@BOTH
async def test_a01_text_is_whole_in_every_way_it_is_told(stage: Stage, path: str) -> None:
    stage.script.text = FAMILY
    _, body = await stage.post(path, question(path, max_tokens=200))
    events = await stage.events(path, **question(path, max_tokens=200))
    assert text_in(body) == text_of(events) == FAMILY
    assert "\ufffd" not in json.dumps(events, ensure_ascii=False)


@BOTH
async def test_a03_a_stop_string_is_held_back_until_certain(stage: Stage, path: str) -> None:
    stage.script.text, stage.script.ending = ALPHABET, "length"
    for stop, text in (("DEFGHIJ", " "), ("DEFX", ALPHABET), ("P", ALPHABET[:-1])):
        events = await stage.events(path, **question(path, stop=[stop]))
        assert text_of(events) == text
        assert reasons_of(events) == ["length" if text == ALPHABET else "stop"]
        shown = await stage.events(path, **question(path, stop=[stop], include_stop_str_in_output=True))
        assert text_of(shown) == (text if text == ALPHABET else text + stop)


@BOTH
@pytest.mark.parametrize(("max_tokens", "reason"), [(5, "length"), (50, "stop")])
async def test_a07_one_finish_reason_for_each_choice_on_its_last_chunk(
    stage: Stage, path: str, max_tokens: int, reason: str
) -> None:
    ask = question(path, max_tokens=max_tokens, n=2)
    events = await stage.events(path, **ask, stream_options={"include_usage": True})
    assert [reasons_of(events, index) for index in (0, 1)] == [[reason], [reason]]
    assert events[-1]["choices"] == []
    for index in (0, 1):
        mine = [c for event in events for c in event["choices"] if c["index"] == index]
        assert mine[-1]["finish_reason"] == reason
    _, body = await stage.post(path, ask)
    assert [choice["finish_reason"] for choice in body["choices"]] == [reason, reason]


async def test_a09_a_stream_whose_decode_is_killed_ends_with_an_error(stage: Stage) -> None:
    stage.script.text, stage.script.hold_after = "x" * 100, 20
    body = {"model": "tiny", "prompt": "abc", "stream": True}
    async with stage.http.post(stage.url + COMPLETIONS, json=body) as response:
        for _ in range(20):
            await response.content.readuntil(b"\n\n")
        stage.made.routes = [Rejected("no_decode", "no decode instance serves", 1.0)]
        stage.made.workers["d"].kill()
        async with asyncio.timeout(10):
            rest = (await response.content.read()).decode().split("\n\n")
    assert rest[-2:] == ["data: [DONE]", ""]
    assert set(json.loads(rest[-3].removeprefix("data: "))["error"]) == {"message", "type", "param", "code"}
    assert stage.made.metrics.requests("error")._value.get() == 1
    assert stage.made.gateway.num_in_flight == 0


@BOTH
async def test_b14_usage_in_a_stream(stage: Stage, path: str) -> None:
    ask = question(path, max_tokens=5)
    with_usage = await stage.events(path, **ask, stream_options={"include_usage": True})
    assert with_usage[-1]["choices"] == []
    assert with_usage[-1]["usage"]["completion_tokens"] == 5
    assert all(event.get("usage") is None for event in with_usage[:-1])
    for options in ({"include_usage": False}, {}, None):
        events = await stage.events(path, **ask, stream_options=options)
        assert all(event["choices"] and event.get("usage") is None for event in events)
    refused = await stage.post(path, ask | {"stream_options": {"include_usage": True}})
    assert error_of(refused, 400)["param"] == "stream_options"


@BOTH
async def test_continuous_usage_counts_up(stage: Stage, path: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = await stage.events(path, **question(path, max_tokens=5, stream_options=options))
    counts = [event["usage"]["completion_tokens"] for event in events]  # in every chunk
    assert counts == sorted(counts)
    assert counts[-1] == 5
    assert len(counts) > 1


async def test_b16_no_limit_is_the_room_there_is(stage: Stage) -> None:
    stage.script.text = "x" * 300
    for fields in ({}, {"max_tokens": None}):
        status, body = await stage.complete(**fields)
        assert (status, body["usage"]["completion_tokens"]) == (200, 253)
        assert (await stage.chat(**fields))[1]["usage"]["total_tokens"] == 256
    assert (await stage.chat(max_completion_tokens=8))[1]["usage"]["completion_tokens"] == 8
    assert (await stage.chat(max_completion_tokens=8, max_tokens=9))[1]["usage"]["completion_tokens"] == 8


@BOTH
async def test_b18_odd_limits(stage: Stage, path: str) -> None:
    for value in (0, -1, 1.5, "5", True):
        answer = await stage.post(path, question(path, max_tokens=value))
        assert error_of(answer, 400)["param"] == "max_tokens"
    for fine in (None, 10**9):
        assert (await stage.post(path, question(path, max_tokens=fine)))[0] == 200


async def test_b64_nothing_to_start_from(stage: Stage) -> None:
    prompts: tuple[object, ...] = ("", [], [""], [[]], None)
    for prompt in prompts:
        assert error_of(await stage.complete(prompt=prompt), 400)["param"] == "prompt"
        await lives(stage)


async def test_b64_no_messages(stage: Stage) -> None:
    for messages in ([], None, [{"role": "user"}], [{"content": "x"}]):
        assert error_of(await stage.chat(messages=messages), 400)["param"].startswith("messages")
    assert (await stage.complete(prompt=" "))[0] == 200
    assert (await stage.chat(messages=[{"role": "user", "content": ""}]))[0] == 200


@BOTH
async def test_d06_stops(stage: Stage, path: str) -> None:
    refused: tuple[object, ...] = (list("abcde"), [""], [1, 2], list("x" * 33), 5, {}, "x" * 1025)
    for stop in refused:
        assert error_of(await stage.post(path, question(path, stop=stop)), 400)["param"] == "stop"
    for fine in ([], "", None, list("abcd"), ["zz"]):
        assert (await stage.post(path, question(path, stop=fine)))[0] == 200


async def test_d65_what_a_strict_template_raises_is_the_clients_error(tmp_path: Path) -> None:
    async with open_stage(make_vocabulary(tmp_path, STRICT_TEMPLATE)) as stage:
        for roles in (["assistant"], ["system"], ["system", "system", "user"], ["user", "user"]):
            refused = await stage.chat(messages=[{"role": role, "content": "x"} for role in roles])
            error = error_of(refused, 400)
            assert error["param"] == "messages"
            assert "roles must alternate" in error["message"]
        wizard = error_of(await stage.chat(messages=[{"role": "wizard", "content": "x"}]), 400)
        assert wizard["param"] == "messages[0].role"
        assert (await stage.chat())[0] == 200


async def test_d65_a_model_without_a_template(tmp_path: Path) -> None:
    async with open_stage(make_vocabulary(tmp_path, None)) as stage:
        assert "no chat template" in error_of(await stage.chat(), 400)["message"]
        assert (await stage.complete())[0] == 200


NO_REQUESTS = (
    b"{",
    b"[]",
    b'"x"',
    b"",
    b'{"model": "tiny", "prompt": NaN}',
    b"[" * 10_000,
    b'{"model": ' + b'{"a":' * 10_000 + b"1" + b"}" * 10_000 + b"}",
    b'{"model": "tiny", "model": "tiny", "prompt": "x"}',
    b"\x1f\x8b\x08\x00 no json",
    b"\xff\xfe",
)


@BOTH
async def test_d66_what_is_no_request(stage: Stage, path: str) -> None:
    for body in NO_REQUESTS:
        assert error_of(await stage.post(path, body), 400)["type"] == "invalid_request_error"
        wrong_type = await stage.post(path, body, **{"Content-Type": "text/plain"})
        assert error_of(wrong_type, 415)["code"] == "unsupported_media_type"
        await lives(stage)


WRONG_VALUES: tuple[dict[str, Any], ...] = (
    {"temperature": -1},
    {"top_p": 0},
    {"top_p": 2},
    {"n": 0},
    {"logprobs": 100},
    {"logit_bias": {"x": 1}},
    {"seed": "a"},
    {"frequency_penalty": 9},
    {"stream": "yes"},
    {"wibble": 1},
    {"tools": [{}]},
    {"store": True},
    {"service_tier": "flex"},
)


@BOTH
async def test_d67_wrong_values_never_leave_the_gateway(stage: Stage, path: str) -> None:
    """Whatever topology serves: nothing is routed before the request is valid."""
    for fields in WRONG_VALUES:
        [name] = fields
        error = error_of(await stage.post(path, question(path, **fields)), 400)
        assert error["param"] == name
    assert stage.made.asked.items == []
    assert stage.script.jobs == []


async def test_d67_an_unknown_model(stage: Stage) -> None:
    assert error_of(await stage.chat(model="nope"), 404)["code"] == "model_not_found"
    assert error_of(await stage.complete(model=""), 404)["param"] == "model"


async def test_d68_what_no_output_can_follow(stage: Stage) -> None:
    for asked in ({"type": "json_schema", "json_schema": {"schema": {"type": "foo"}}}, {"type": "xml"}):
        error = error_of(await stage.chat(response_format=asked), 400)
        assert error["param"].startswith("response_format")


@pytest.mark.parametrize("stream", ["true", "false"])
async def test_d69_half_a_surrogate_pair(stage: Stage, stream: str) -> None:
    fine = "\\ud83d\\ude00"
    cases = [(field, "a\\ud800b", 400) for field in ("content", "stop", "model", "user")]
    cases += [(field, fine, 200) for field in ("content", "stop", "user")] + [("model", fine, 404)]
    for field, text, status in cases:
        values = {"content": "x", "stop": "zz", "model": "tiny", "user": "me"} | {field: text}
        raw = (
            f'{{"messages": [{{"role": "user", "content": "{values["content"]}"}}], "stream": {stream}, '
            f'"stop": "{values["stop"]}", "model": "{values["model"]}", "user": "{values["user"]}"}}'
        )
        async with stage.http.post(
            stage.url + CHAT, data=raw, headers={"Content-Type": "application/json"}
        ) as response:
            assert response.status == status


async def test_d70_a_request_id_is_a_label_only(stage: Stage) -> None:
    stage.script.text, stage.script.hold_after = "Hello there.", 3
    headers = {"X-Request-Id": "same"}
    body = {"model": "tiny", "prompt": "abc", "stream": True}

    async def ask() -> None:
        async with stage.http.post(stage.url + COMPLETIONS, json=body, headers=headers) as response:
            assert response.headers["X-Request-Id"] == "same"
            await response.read()

    first, second = asyncio.create_task(ask()), asyncio.create_task(ask())
    await stage.made.workers["p"].jobs.wait_for(2)
    assert len({job.key.request for job in stage.script.jobs}) == 2
    await asyncio.sleep(0.1)
    first.cancel()
    [abort] = await stage.made.workers["d"].aborts.wait_for(1, timeout_s=3)
    assert stage.made.gateway.num_in_flight == 1
    [kept] = [job for job in stage.script.jobs if job.key.request != abort.key.request]
    for item in stage.ending(kept, 3):
        stage.made.workers["d"].emit(kept.gateway, item)
    await second
