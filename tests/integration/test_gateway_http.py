"""The gateway over real HTTP, in front of workers that say what a test tells them to."""

import asyncio
import json
import threading
from typing import Any

import openai
import pytest

from common.config import GatewaySettings
from common.messages.generation import Rejected
from services.gateway.http import middleware, sse
from services.gateway.http.chunks import ChunkNarrator
from services.gateway.reply import Batch, Reply
from services.gateway.tokenizing import Vocabulary
from tests.support.http_stage import FAMILY, Stage, error_of, open_stage, reasons_of, text_of


async def test_a_chat_answer(stage: Stage) -> None:
    status, body = await stage.chat()
    assert status == 200
    assert body["object"] == "chat.completion"
    [choice] = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello there.", "refusal": None}
    assert choice["finish_reason"] == "stop"
    prompt = len("<|start|>user\nHi<|end|>\n<|start|>assistant\n") - 3 * len("<|start|>") + 2 + 3
    assert body["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 13,
        "total_tokens": prompt + 13,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    assert stage.script.jobs[0].sampling.max_tokens == 256 - prompt


async def test_a_chat_stream_is_the_same_text(stage: Stage) -> None:
    stage.script.text = FAMILY
    messages = [{"role": "user", "content": "Hi"}]
    events = await stage.events(
        "/v1/chat/completions", messages=messages, stream_options={"include_usage": True}
    )
    assert text_of(events) == FAMILY
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert reasons_of(events) == ["stop"]
    assert len({event["id"] for event in events}) == 1
    assert all(event["object"] == "chat.completion.chunk" for event in events)
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == len(FAMILY.encode()) + 1
    assert all("usage" not in event for event in events[:-1])
    assert "\ufffd" not in json.dumps(events, ensure_ascii=False)


async def test_a_completion_for_each_prompt_and_choice(stage: Stage) -> None:
    status, body = await stage.complete(prompt=["ab", [70, 71, 72]], n=2, max_tokens=3)
    assert status == 200
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert {choice["text"] for choice in body["choices"]} == {"Hel"}
    assert body["usage"]["prompt_tokens"] == 5
    assert body["usage"]["completion_tokens"] == 12
    prompts = [job.prompt_ids for job in stage.script.jobs]
    assert prompts[0] == prompts[1]
    assert prompts[2] == prompts[3] == (70, 71, 72)
    events = await stage.events("/v1/completions", prompt="x", n=2, max_tokens=3)
    assert [text_of(events, index) for index in (0, 1)] == ["Hel", "Hel"]
    assert [reasons_of(events, index) for index in (0, 1)] == [["length"], ["length"]]


async def test_a_stop_string_is_the_same_in_both_modes(stage: Stage) -> None:
    _, body = await stage.complete(stop="o there")
    assert body["choices"][0]["text"] == "Hell"
    assert body["choices"][0]["finish_reason"] == "stop"
    events = await stage.events("/v1/completions", prompt="abc", stop="o there")
    assert (text_of(events), reasons_of(events)) == ("Hell", ["stop"])
    events = await stage.events("/v1/completions", prompt="abc", stop="o thereX")
    assert (text_of(events), reasons_of(events)) == ("Hello there.", ["stop"])


async def test_logprobs_in_both_shapes(stage: Stage) -> None:
    _, body = await stage.chat(logprobs=True, top_logprobs=2, max_tokens=2)
    content = body["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["H", "e"]
    assert content[0]["bytes"] == [72]
    assert [top["token"] for top in content[0]["top_logprobs"]] == ["H", "<|end|>"]
    _, body = await stage.complete(logprobs=1, max_tokens=3)
    assert body["choices"][0]["logprobs"] == {
        "tokens": ["H", "e", "l"],
        "token_logprobs": [-0.5, -0.5, -0.5],
        "top_logprobs": [{"H": -0.5}, {"e": -0.5}, {"l": -0.5}],
        "text_offset": [0, 1, 2],
    }
    events = await stage.events("/v1/completions", prompt="x", logprobs=0, max_tokens=2)
    found = [c["logprobs"]["text_offset"] for e in events for c in e["choices"] if c["logprobs"]["tokens"]]
    assert found == [[0], [1]]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_token_ids_in_both_shapes_and_modes(stage: Stage, path: str) -> None:
    stage.script.text = FAMILY  # most of its tokens are no text by themselves
    ids = stage.made.gateway.vocabulary.tokenizer.encode(FAMILY)
    question: dict[str, Any] = {"prompt": "abc"}
    if "chat" in path:
        question = {"messages": [{"role": "user", "content": "Hi"}]}
    question |= {"model": "tiny", "return_token_ids": True}
    status, body = await stage.post(path, question)
    assert (status, body["choices"][0]["token_ids"]) == (200, list(ids))
    events = await stage.events(path, **question)
    assert [id_ for event in events for id_ in event["choices"][0]["token_ids"]] == list(ids)


async def test_the_official_client(stage: Stage) -> None:
    client = openai.AsyncOpenAI(base_url=f"{stage.url}/v1", api_key="none", max_retries=0)
    async with client:
        chunks = await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "Hi"}], stream=True
        )
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])
        assert text == "Hello there."
        assert [card.id async for card in client.models.list()] == ["tiny"]
        with pytest.raises(openai.NotFoundError):
            await client.completions.create(model="no-such-model", prompt="x")
        with pytest.raises(openai.BadRequestError):
            await client.completions.create(model="tiny", prompt="x", temperature=-1)


async def test_refusals(stage: Stage) -> None:
    assert error_of(await stage.complete(prompt="x" * 300), 400)["code"] == "context_length_exceeded"
    assert error_of(await stage.complete(prompt="x" * 100_000), 400)["code"] == "context_length_exceeded"
    assert error_of(await stage.complete(prompt="x" * 256), 400)["param"] == "prompt"
    assert error_of(await stage.complete(prompt=""), 400)["param"] == "prompt"
    assert error_of(await stage.complete(model="nope"), 404)["code"] == "model_not_found"
    assert error_of(await stage.post("/v1/completions", b"{oops"), 400)["type"] == "invalid_request_error"
    assert error_of(await stage.post("/v1/completions", b'{"model": "tiny", "prompt": "\\ud800"}'), 400)
    plain = {"Content-Type": "text/plain"}
    assert error_of(await stage.post("/v1/completions", b"{}", **plain), 415)
    assert error_of(await stage.post("/v1/completions", b"x" * (1 << 21)), 413)
    assert error_of(await stage.post("/v1/nothing-here", {}), 404)
    squeezed = {"Content-Encoding": "gzip"}
    assert error_of(await stage.post("/v1/completions", b"no gzip", **squeezed), 400)
    async with stage.http.get(stage.url + "/v1/completions") as response:
        assert response.status == 405
        assert (await response.json())["error"]["code"] == "method_not_allowed"
        assert response.headers["Allow"] == "POST"
    assert stage.script.jobs == []


async def test_a_body_that_cannot_be_unpacked_closes_its_connection(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        squeezed = {"Content-Encoding": "gzip"}
        assert error_of(await stage.post("/v1/completions", b"no gzip", **squeezed), 400)
        assert (await stage.complete())[0] == 200
    assert caplog.records == []


async def test_refusals_are_counted(stage: Stage) -> None:
    await stage.post("/v1/completions", b"{")
    await stage.complete(prompt="x" * 5000)
    await stage.chat(temperature=-1)
    await stage.complete()
    counted = {
        status: stage.made.gateway.metrics.requests(status)._value.get() for status in ("ok", "rejected")
    }
    assert counted == {"ok": 1, "rejected": 3}


async def test_nobody_serves(stage: Stage) -> None:
    stage.made.routes = [Rejected("no_decode", "no decode instance serves", 1.5)]
    async with stage.http.post(
        stage.url + "/v1/completions", json={"model": "tiny", "prompt": "x"}
    ) as response:
        assert response.status == 503
        assert response.headers["Retry-After"] == "2"
    stream = {"model": "tiny", "prompt": "x", "stream": True}
    async with stage.http.post(stage.url + "/v1/completions", json=stream) as response:
        assert response.status == 503
        assert response.content_type == "application/json"


async def test_an_error_in_mid_stream(stage: Stage) -> None:
    stage.script.ending = "fail"
    events = await stage.events("/v1/completions", prompt="abc")
    assert text_of(events[:-1]) == "Hello there."
    assert events[-1]["error"]["message"] == "broken for good"
    assert error_of(await stage.complete(), 502)["code"] == "worker_failed"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_is_aborted(stage: Stage, stream: bool) -> None:
    stage.script.hold_after = 3
    body = {"model": "tiny", "prompt": "abc", "stream": stream}

    async def ask() -> None:
        async with stage.http.post(stage.url + "/v1/completions", json=body) as response:
            await response.read()

    asking = asyncio.create_task(ask())
    await stage.made.workers["p"].jobs.wait_for(1)
    await asyncio.sleep(0.1)
    asking.cancel()
    [abort] = await stage.made.workers["d"].aborts.wait_for(1, timeout_s=3)
    assert abort.reason == "client"
    assert stage.made.gateway.num_in_flight == 0


async def ask_without_reading(stage: Stage) -> asyncio.StreamWriter:
    """A request for a stream, by a client that reads nothing of it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(stage.url.rsplit(":", 1)[1]), limit=1)
    body = json.dumps({"model": "tiny", "prompt": "abc", "stream": True})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    reader._transport.pause_reading()  # type: ignore[attr-defined]
    writer.write((head + body).encode())
    return writer


async def test_a_client_that_does_not_read_loses_its_stream_only(vocabulary: Vocabulary) -> None:
    roomy = Vocabulary(vocabulary.tokenizer, vocabulary.eos_ids, 10_000, "tiny")
    async with open_stage(roomy, GatewaySettings(max_unread_bytes=25_000)) as stage:
        stage.script.text = "x" * 4000
        stage.script.per_turn = 20
        writer = await ask_without_reading(stage)
        [abort] = await stage.made.workers["p"].aborts.wait_for(1, timeout_s=5)
        assert abort.key == stage.script.jobs[0].key
        writer.transport.abort()
        stage.script.text = "Hello there."
        _, answer = await stage.complete()
        assert answer["choices"][0]["text"] == "Hello there."
        assert 'requests_aborted_total{instance="gw",reason="slow_reader",role="gateway"} 1.0' in (
            stage.made.metrics.exposition().decode()
        )


async def test_a_stream_that_nobody_reads_ends_although_its_tokens_have_all_come(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "STALL_S", 0.2)
    roomy = Vocabulary(vocabulary.tokenizer, vocabulary.eos_ids, 10_000, "tiny")
    cut = asyncio.Event()
    monkeypatch.setattr(sse.EventStream, "cut", lambda _: cut.set())
    async with open_stage(roomy, GatewaySettings(max_unread_bytes=3_000_000)) as stage:
        stage.script.text = "x" * 4000
        writer = await ask_without_reading(stage)
        async with asyncio.timeout(10):
            await cut.wait()
        assert stage.made.gateway.num_in_flight == 0
        writer.transport.abort()


@pytest.mark.parametrize(("length", "inline"), [(10, True), (2000, False)])
async def test_a_long_scored_prompt_is_told_in_a_thread(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch, length: int, inline: bool
) -> None:
    tell, threads = ChunkNarrator.tell, []

    def noting(self: ChunkNarrator, batch: Batch, reply: Reply) -> list[bytes]:
        threads.append(threading.current_thread())
        return tell(self, batch, reply)

    monkeypatch.setattr(ChunkNarrator, "tell", noting)
    roomy = Vocabulary(vocabulary.tokenizer, vocabulary.eos_ids, 10_000, "tiny")
    async with open_stage(roomy) as stage:
        asked = {"prompt": "x" * length, "echo": True, "logprobs": 20, "max_tokens": 5, "n": 2}
        events = await stage.events("/v1/completions", **asked)
        _, whole = await stage.complete(**asked)
    assert (threads[0] is threading.main_thread()) == inline
    for index in range(2):
        assert text_of(events, index) == whole["choices"][index]["text"] == "x" * length + "Hello"
        choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
        for key, entries in whole["choices"][index]["logprobs"].items():
            assert [entry for choice in choices for entry in choice["logprobs"][key]] == entries
        assert len(whole["choices"][index]["logprobs"]["tokens"]) == length + 5


async def test_a_body_that_does_not_come_is_not_waited_for(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(middleware, "BODY_TIMEOUT_S", 0.1)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(stage.url.rsplit(":", 1)[1]))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    async with asyncio.timeout(5):
        answer = await reader.readuntil(b"}}")
    writer.close()
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"the body did not arrive within 0.1 s" in answer


async def test_request_ids_and_probes(stage: Stage) -> None:
    headers = {"X-Request-Id": "mine"}
    async with stage.http.get(stage.url + "/v1/models", headers=headers) as response:
        assert response.headers["X-Request-Id"] == "mine"
        assert (await response.json())["data"][0]["max_model_len"] == 256
    async with stage.http.get(stage.url + "/v1/models/tiny") as response:
        assert (await response.json())["id"] == "tiny"
    async with stage.http.get(stage.url + "/v1/models/other") as response:
        assert response.status == 404
        assert response.headers["X-Request-Id"]
    for path in ("/healthz", "/readyz", "/health", "/metrics"):
        async with stage.http.get(stage.url + path) as response:
            assert response.status == 200, path
