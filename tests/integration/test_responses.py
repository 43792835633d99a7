"""/v1/responses, /tokenize, /detokenize and the X-Galley headers over real HTTP."""

import json
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseOutputMessage

from common.messages.generation import SLO
from tests.support.http_stage import FAMILY, Stage, error_of, text_of

HI = [{"role": "user", "content": "Hi"}]
EVENTS = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.completed",
]


async def respond(stage: Stage, **fields: Any) -> tuple[int, Any]:
    return await stage.post("/v1/responses", {"model": "tiny", "input": "Hi"} | fields)


def client(stage: Stage) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{stage.url}/v1", api_key="none", max_retries=0)


async def test_a_response_is_an_openai_response(stage: Stage) -> None:
    status, body = await respond(
        stage, instructions="Be kind.", metadata={"a": "b"}, user="me", temperature=0.5, max_output_tokens=50
    )
    assert status == 200
    parsed = Response.model_validate(body)
    assert parsed.output_text == "Hello there."
    assert (parsed.status, parsed.incomplete_details, parsed.error) == ("completed", None, None)
    assert (parsed.instructions, parsed.metadata, parsed.user) == ("Be kind.", {"a": "b"}, "me")
    assert (parsed.temperature, parsed.max_output_tokens) == (0.5, 50)
    assert parsed.usage is not None
    assert parsed.usage.output_tokens == len("Hello there.") + 1
    assert parsed.usage.input_tokens_details.cached_tokens == 2
    [job] = stage.script.jobs
    prompt = stage.made.gateway.vocabulary.tokenizer.spell(job.prompt_ids)
    assert prompt == "<|start|>system\nBe kind.<|end|>\n<|start|>user\nHi<|end|>\n<|start|>assistant\n"
    assert (job.sampling.temperature, job.sampling.max_tokens) == (0.5, 50)


async def test_a_streamed_response_tells_itself_in_numbered_events(stage: Stage) -> None:
    stage.script.text = FAMILY
    async with client(stage) as ai:
        events = [event async for event in await ai.responses.create(model="tiny", input="Hi", stream=True)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert list(dict.fromkeys(event.type for event in events)) == EVENTS
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == FAMILY
    [done] = [event for event in events if event.type == "response.output_text.done"]
    last = events[-1]
    assert last.type == "response.completed"
    assert done.text == last.response.output_text == FAMILY
    assert last.response.usage is not None
    assert last.response.usage.output_tokens == len(FAMILY.encode()) + 1
    assert {event.item_id for event in events if hasattr(event, "item_id")} == {last.response.output[0].id}


async def test_a_response_cut_short_is_incomplete(stage: Stage) -> None:
    async with client(stage) as ai:
        whole = await ai.responses.create(model="tiny", input="Hi", max_output_tokens=3)
        assert (whole.status, whole.output_text) == ("incomplete", "Hel")
        assert isinstance(whole.output[0], ResponseOutputMessage)
        assert whole.output[0].status == "incomplete"
        assert whole.incomplete_details is not None
        assert whole.incomplete_details.reason == "max_output_tokens"
        stream = await ai.responses.create(model="tiny", input="Hi", max_output_tokens=3, stream=True)
        events = [event async for event in stream]
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == "Hel"


async def test_an_earlier_output_is_an_input_again(stage: Stage) -> None:
    async with client(stage) as ai:
        first = await ai.responses.create(model="tiny", input="Hi")
        history: list[Any] = [{"role": "developer", "content": [{"type": "input_text", "text": "Be kind."}]}]
        history += [{"role": "user", "content": "Hi"}, *first.output, {"role": "user", "content": "And?"}]
        await ai.responses.create(model="tiny", input=history)
    prompt = stage.made.gateway.vocabulary.tokenizer.spell(stage.script.jobs[1].prompt_ids)
    assert prompt == (
        "<|start|>system\nBe kind.<|end|>\n<|start|>user\nHi<|end|>\n"
        "<|start|>assistant\nHello there.<|end|>\n<|start|>user\nAnd?<|end|>\n<|start|>assistant\n"
    )


async def test_a_stream_that_breaks_says_so_in_its_own_events(stage: Stage) -> None:
    stage.script.ending = "fail"
    body = {"model": "tiny", "input": "Hi", "stream": True}
    async with stage.http.post(stage.url + "/v1/responses", json=body) as response:
        assert response.status == 200
        *_, error, failed, rest = (await response.text()).split("\n\n")
    assert rest == ""
    assert error.startswith("event: error\ndata: ")
    assert json.loads(error.split("data: ")[1])["message"] == "broken for good"
    told = json.loads(failed.split("data: ")[1])
    assert (told["type"], told["response"]["status"]) == ("response.failed", "failed")
    assert told["response"]["error"]["code"] == "server_error"


REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"input": []}, "input"),
    ({"input": 5}, "input"),
    ({"input": [{"role": "wizard", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"store": True}, "store"),
    ({"background": True}, "background"),
    ({"tools": [{"type": "web_search"}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"include": ["message.output_text.logprobs"]}, "include"),
    ({"reasoning": {"effort": "low"}}, "reasoning.effort"),
    ({"truncation": "auto"}, "truncation"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"wibble": 1}, "wibble"),
    ({"input": "x" * 240}, "input"),
)


async def test_what_a_response_cannot_do_is_refused_by_name(stage: Stage) -> None:
    for fields, param in REFUSED:
        assert error_of(await respond(stage, **fields), 400)["param"] == param
    assert stage.script.jobs == []


async def test_text_to_tokens_and_back(stage: Stage) -> None:
    status, body = await stage.post("/tokenize", {"model": "tiny", "prompt": "Hi é"})
    ids = stage.made.gateway.vocabulary.tokenizer.encode("Hi é")
    assert (status, body) == (200, {"count": 5, "max_model_len": 256, "tokens": ids})
    assert await stage.post("/detokenize", {"tokens": ids}) == (200, {"prompt": "Hi é"})
    _, chat = await stage.post("/tokenize", {"messages": HI})
    _, back = await stage.post("/detokenize", {"model": "tiny", "tokens": chat["tokens"]})
    assert back == {"prompt": "<|start|>user\nHi<|end|>\n<|start|>assistant\n"}
    await stage.chat()
    assert list(stage.script.jobs[0].prompt_ids) == chat["tokens"]
    assert await stage.post("/tokenize", {"prompt": ""}) == (
        200,
        {"count": 0, "max_model_len": 256, "tokens": []},
    )


async def test_how_text_becomes_tokens_can_be_chosen(stage: Stage) -> None:
    async def tokenize(**body: Any) -> Any:
        status, answer = await stage.post("/tokenize", body)
        assert status == 200, answer
        _, back = await stage.post("/detokenize", {"tokens": answer["tokens"]})
        return back["prompt"]

    chat = "<|start|>user\nHi<|end|>\n"
    assert await tokenize(messages=HI, add_generation_prompt=False) == chat
    begun = [*HI, {"role": "assistant", "content": "Hello th"}]
    assert await tokenize(messages=begun, add_generation_prompt=False, continue_final_message=True) == (
        f"{chat}<|start|>assistant\nHello th"
    )
    _, answer = await stage.post("/tokenize", {"messages": HI, "return_token_strs": True})
    assert answer["token_strs"][:3] == ["<|start|>", "u", "s"]
    assert len(answer["token_strs"]) == answer["count"]
    _, answer = await stage.post("/tokenize", {"prompt": "é", "return_token_strs": True})
    assert answer["token_strs"] == ["Ã", "©"]  # as the vocabulary spells bytes


NO_TOKENS: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": "x", "messages": HI}, "prompt"),
    ("/tokenize", {"prompt": 5}, "prompt"),
    ("/tokenize", {"messages": [{"role": "user"}]}, "messages[0].content"),
    ("/tokenize", {"prompt": "x", "add_special_tokens": "yes"}, "add_special_tokens"),
    ("/tokenize", {"messages": HI, "continue_final_message": True}, "continue_final_message"),
    (
        "/tokenize",
        {"prompt": "x", "continue_final_message": True, "add_generation_prompt": False},
        "continue_final_message",
    ),
    ("/detokenize", {}, "tokens"),
    ("/detokenize", {"tokens": ["x"]}, "tokens"),
    ("/detokenize", {"tokens": [-1]}, "tokens"),
    ("/detokenize", {"tokens": [10**6]}, "tokens"),
)


async def test_what_cannot_be_tokenized(stage: Stage) -> None:
    for path, body, param in NO_TOKENS:
        assert error_of(await stage.post(path, body), 400)["param"] == param


async def test_only_the_models_own_tokens_are_known(stage: Stage) -> None:
    other = {"model": "other"}
    assert error_of(await stage.post("/tokenize", other | {"prompt": "x"}), 404)["code"] == "model_not_found"
    assert error_of(await stage.post("/detokenize", other | {"tokens": []}), 404)["param"] == "model"


@pytest.mark.parametrize("include_usage", [False, True])
async def test_timing_is_on_the_last_chunk(stage: Stage, include_usage: bool) -> None:
    told = {
        "queue_ms": 1.0,
        "prefill_ms": 1.0,
        "transfer_ms": 1.0,
        "prefill": "p",
        "decode": "d",
    }
    status, body = await stage.post(
        "/v1/completions", {"model": "tiny", "prompt": "x"}, **{"X-Galley-Timing": "1"}
    )
    assert status == 200
    assert set(body["galley"]) == set(told) | {"ttft_ms", "tpot_ms"}
    assert {key: body["galley"][key] for key in told} == told
    stage.http.headers["X-Galley-Timing"] = "1"
    events = await stage.events(
        "/v1/chat/completions", messages=HI, stream_options={"include_usage": include_usage}
    )
    assert text_of(events) == "Hello there."
    assert all("galley" not in event for event in events[:-1])
    assert {key: events[-1]["galley"][key] for key in told} == told
    assert 0 < events[-1]["galley"]["ttft_ms"] < 10_000
    assert 0 <= events[-1]["galley"]["tpot_ms"] < 10_000
    _, body = await respond(stage)
    assert body["galley"]["decode"] == "d"
    del stage.http.headers["X-Galley-Timing"]
    assert "galley" not in (await stage.chat())[1]


async def test_priority_salt_and_budget_are_carried(stage: Stage) -> None:
    budget = {"X-Galley-TTFT-Ms": "250", "X-Galley-TPOT-Ms": "12.5"}
    body = {"model": "tiny", "prompt": "x", "priority": -3, "cache_salt": "s"}
    assert (await stage.post("/v1/completions", body, **budget))[0] == 200
    [job] = stage.script.jobs
    assert (job.priority, job.cache_salt, job.slo) == (-3, "s", SLO(0.25, 0.0125))
    assert stage.made.asked.items[0].slo == SLO(0.25, 0.0125)
    await stage.post("/v1/completions", body, **{"X-Galley-TTFT-Ms": "100"})
    assert stage.script.jobs[1].slo == SLO(0.1, None)
    for header, value in [("X-Galley-TTFT-Ms", "soon"), ("X-Galley-TPOT-Ms", "0"), ("X-Galley-Timing", "x")]:
        refused = error_of(await stage.post("/v1/completions", body, **{header: value}), 400)
        assert refused["param"] == header
