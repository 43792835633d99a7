"""Completions that begin with their prompt: the legacy shape, whole and in chunks."""

from typing import Any

import pytest

from common.errors import InvalidRequest
from common.messages.stream import TokenLogprobs
from services.gateway.openai.answers import AnswerHead, CompletionShape, Echo, gather
from services.gateway.openai.base import validate
from services.gateway.openai.completions import CompletionRequest
from services.gateway.request import Delta, Token, Usage

HEAD = AnswerHead("cmpl-1", 0, "m", "fp")
USAGE = Usage(3, 2, 0)
SCORES = (TokenLogprobs(-1.0, ((98, -1.0), (120, -2.0))), TokenLogprobs(-9999.0, ((97, -0.5),)))
DELTAS = [
    Delta(0, "", (), prompt=SCORES),
    Delta(0, "d", (Token(100, TokenLogprobs(-0.25, ((100, -0.25),))),)),
    Delta(0, "e", (Token(101, TokenLogprobs(-0.5, ((102, -0.1),))),), "length"),
]
LOGPROBS = {
    "tokens": ["a", "b", "c", "d", "e"],
    "token_logprobs": [None, -1.0, -9999.0, -0.25, -0.5],
    "top_logprobs": [
        None,
        {"b": -1.0, "x": -2.0},
        {"a": -0.5, "c": -9999.0},
        {"d": -0.25},
        {"f": -0.1, "e": -0.5},
    ],
    "text_offset": [0, 1, 2, 3, 4],
}


def shape(*, logprobs: bool, echo: tuple[Echo, ...] = (Echo("abc", (97, 98, 99)),)) -> CompletionShape:
    return CompletionShape(HEAD, lambda i: bytes([i]), logprobs=logprobs, token_ids=False, echo=echo)


def choices_of(bodies: list[Any]) -> list[Any]:
    return [choice for body in bodies for choice in body["choices"]]


def test_logprobs_cover_prompt_and_completion() -> None:
    body: Any = shape(logprobs=True).whole(gather(DELTAS, 1), USAGE)
    [choice] = body["choices"]
    assert choice == {"index": 0, "text": "abcde", "logprobs": LOGPROBS, "finish_reason": "length"}


def test_chunks_add_up_to_the_whole() -> None:
    one = shape(logprobs=True)
    chunks = choices_of([chunk for delta in DELTAS for chunk in one.chunks(delta)])
    assert "".join(chunk["text"] for chunk in chunks) == "abcde"
    assert chunks[0]["text"] == "abc"
    for key, expected in LOGPROBS.items():
        assert [entry for chunk in chunks for entry in chunk["logprobs"][key]] == expected


def test_without_logprobs_the_text_alone_goes_ahead_once() -> None:
    plain = [Delta(0, "d", (Token(100),)), Delta(0, "e", (Token(101),), "length")]
    one = shape(logprobs=False)
    chunks = choices_of([chunk for delta in plain for chunk in one.chunks(delta)])
    assert [chunk["text"] for chunk in chunks] == ["abcd", "e"]
    [choice] = choices_of([shape(logprobs=False).whole(gather(plain, 1), USAGE)])
    assert (choice["text"], choice["logprobs"]) == ("abcde", None)


def test_a_prompt_of_one_token_has_nothing_but_null() -> None:
    one = shape(logprobs=True, echo=(Echo("a", (97,)),))
    [choice] = choices_of([one.whole(gather([Delta(0, "", (), "length")], 1), USAGE)])
    assert choice["text"] == "a"
    assert choice["logprobs"] == {
        "tokens": ["a"],
        "token_logprobs": [None],
        "top_logprobs": [None],
        "text_offset": [0],
    }


def test_every_choice_has_its_own_prompt() -> None:
    echo = (Echo("ab", (97, 98)), Echo("ab", (97, 98)), Echo("xy", (120, 121)))
    deltas = [Delta(index, "", (), prompt=(SCORES[0],)) for index in range(3)]
    deltas += [Delta(index, "!", (Token(33, SCORES[0]),), "stop") for index in range(3)]
    whole: Any = shape(logprobs=True, echo=echo).whole(gather(deltas, 3), USAGE)
    assert [choice["text"] for choice in whole["choices"]] == ["ab!", "ab!", "xy!"]
    assert whole["choices"][2]["logprobs"]["tokens"] == ["x", "y", "!"]


def ask(**fields: Any) -> CompletionRequest:
    request = validate({"model": "m", "prompt": "abc", **fields}, CompletionRequest)
    request.check(1000)
    return request


def test_what_echo_asks_of_workers() -> None:
    def params(**fields: Any) -> Any:
        return ask(**fields).sampling(10, lambda: 1)

    assert params(echo=True).prompt_logprobs is None
    assert params(logprobs=2).prompt_logprobs is None
    assert (params(echo=True, logprobs=0).prompt_logprobs, params(echo=True, logprobs=2).logprobs) == (0, 2)
    scoring = params(echo=True, logprobs=2, max_tokens=0, stop_token_ids=[5], guided_regex="a")
    assert (scoring.max_tokens, scoring.ignore_eos) == (0, True)
    assert (scoring.stop_token_ids, scoring.grammar) == ((), "")


def test_no_tokens_at_all_are_refused() -> None:
    with pytest.raises(InvalidRequest) as refusal:
        ask(max_tokens=0)
    assert refusal.value.param == "max_tokens"
    with pytest.raises(InvalidRequest):
        ask(max_tokens=-1, echo=True)
