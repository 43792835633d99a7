"""Cases A-D of docs/cases.md that take real workers: the same questions to a split and a fused cluster."""

import asyncio
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import orjson
import pytest
import pytest_asyncio

from common.config import Topology
from tests.support.real_cluster import MODEL, RealCluster, at_a_time, real_cluster
from tests.support.tiny_models import CONTEXT, END_ID, SPECIAL, make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

NUM_BLOCKS = 48
"""Of 16 tokens: fewer than the model's context."""
FUSED: Topology = "colocated"
IDS = range(len(SPECIAL), 259)
PRINTABLE = {str(token): 100 for token in range(SPECIAL.index("<|end|>") + 34, len(SPECIAL) + 92)}
"""Biases that leave ASCII alone to be chosen: one byte is one character then."""


@dataclass(frozen=True, slots=True)
class Pair:
    """One model, served in both ways."""

    split: RealCluster
    fused: RealCluster

    async def both(self, prompt: list[int] | str, **fields: Any) -> dict[str, Any]:
        """The answer of the split cluster; checked to be the other's too, but for names and times."""
        first = await self.split.complete(prompt, **fields)
        second = await self.fused.complete(prompt, **fields)
        assert first["choices"] == second["choices"]
        assert first["usage"] == second["usage"]
        return first


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    model = make_tiny_model("llama", tmp_path_factory.mktemp("model"))
    blocks = str(NUM_BLOCKS)
    async with (
        real_cluster(model, tmp_path_factory.mktemp("split"), num_blocks=blocks) as split,
        real_cluster(model, tmp_path_factory.mktemp("fused"), topology=FUSED, num_blocks=blocks) as fused,
    ):
        yield Pair(split, fused)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{length} {seed}").choices(IDS, k=length)


async def events(cluster: RealCluster, prompt: list[int], **fields: Any) -> list[dict[str, Any]]:
    body = {"model": MODEL, "prompt": prompt, "stream": True} | fields
    body["stream_options"] = {"include_usage": True}
    answer = await cluster.http.post(f"{cluster.url}/v1/completions", json=body)
    *found, done, rest = answer.raise_for_status().text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [orjson.loads(event.removeprefix("data: ")) for event in found]


def text_of(told: list[dict[str, Any]], index: int = 0) -> str:
    return "".join(c["text"] for event in told for c in event["choices"] if c["index"] == index)


def reasons_of(told: list[dict[str, Any]], index: int = 0) -> list[str]:
    found = [c["finish_reason"] for event in told for c in event["choices"] if c["index"] == index]
    return [reason for reason in found if reason]


async def test_a05_a_stop_string_stops_decode(pair: Pair) -> None:
    ask: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "logit_bias": PRINTABLE}
    for cluster in (pair.split, pair.fused):
        free = (await cluster.complete(prompt_of(40), **ask, max_tokens=12))["choices"][0]["text"]
        told = await events(cluster, prompt_of(40), **ask, max_tokens=512, stop=[free[6:9]])
        ended = time.monotonic()
        assert reasons_of(told) == ["stop"]
        assert text_of(told) == free[: free.index(free[6:9])]
        await cluster.idle(within_s=1.0)
        assert time.monotonic() - ended < 1.5


async def test_b11_cached_tokens_are_prefills_hits(pair: Pair) -> None:
    for number, cluster in enumerate((pair.split, pair.fused)):
        prompt = prompt_of(600, seed=7 + number)
        ask = {"max_tokens": 2, "cache_salt": "b11"}
        first = (await events(cluster, prompt, **ask))[-1]["usage"]
        second = (await cluster.complete(prompt, **ask))["usage"]
        third = (await events(cluster, prompt, **ask))[-1]["usage"]
        assert first["prompt_tokens_details"]["cached_tokens"] == 0
        assert second == third
        assert second["prompt_tokens"] == 600
        assert second["prompt_tokens_details"]["cached_tokens"] == 592


@pytest.mark.parametrize("count", [1, 2, 3])
async def test_b12_the_handed_over_token_counts_like_any_other(pair: Pair, count: int) -> None:
    ask: dict[str, Any] = {"max_tokens": count, "temperature": 0, "ignore_eos": True, "logprobs": 1}
    for cluster in (pair.split, pair.fused):
        body = await cluster.complete(prompt_of(30), **ask)
        usage = body["usage"]
        assert (usage["completion_tokens"], usage["total_tokens"]) == (count, 30 + count)
        assert len(body["choices"][0]["logprobs"]["tokens"]) == count
        told = await events(cluster, prompt_of(30), **ask)
        assert sum(len(c["logprobs"]["tokens"]) for e in told for c in e["choices"] if c["logprobs"]) == count


async def test_b13_usage_is_the_same_in_a_stream(pair: Pair) -> None:
    ask: dict[str, Any] = {"max_tokens": 37, "temperature": 0, "ignore_eos": True, "cache_salt": "b13"}
    await pair.both(prompt_of(20), **ask)
    whole = await pair.both(prompt_of(20), **ask, return_token_ids=True)
    told = await events(pair.split, prompt_of(20), **ask)
    assert told[-1]["usage"] == whole["usage"]
    assert whole["usage"]["completion_tokens"] == len(whole["choices"][0]["token_ids"]) == 37


async def test_b19_an_end_at_the_handoff(pair: Pair) -> None:
    for cluster in (pair.split, pair.fused):
        before = await cluster.metrics("decode")
        ask: dict[str, Any] = {"logit_bias": {str(END_ID): 100}, "temperature": 0, "max_tokens": 6}
        body = await cluster.complete(prompt_of(21), **ask)
        assert body["choices"][0]["text"] == ""
        assert body["choices"][0]["finish_reason"] == "stop"
        assert body["usage"]["completion_tokens"] == 1
        name = "galley_generated_tokens_total"
        if cluster is pair.split:
            assert (await cluster.metrics("decode")).total(name) == before.total(name)
        on = await cluster.complete(prompt_of(21), **ask, ignore_eos=True)
        assert on["choices"][0]["finish_reason"] == "length"
        assert on["usage"]["completion_tokens"] == 6
        held = await cluster.complete(prompt_of(21), **ask, min_tokens=4)
        assert held["usage"]["completion_tokens"] == 5
        await cluster.idle()


async def test_b20_a_stop_string_that_the_first_token_completes(pair: Pair) -> None:
    ask: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "logit_bias": PRINTABLE}
    first = (await pair.both(prompt_of(33), **ask, max_tokens=1))["choices"][0]["text"]
    assert len(first) == 1
    body = await pair.both(prompt_of(33), **ask, max_tokens=20, stop=[first])
    assert (body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == ("", "stop")
    told = await events(pair.split, prompt_of(33), **ask, max_tokens=20, stop=[first])
    assert (text_of(told), reasons_of(told)) == ("", ["stop"])
    whole = await pair.both(prompt_of(33), **ask, max_tokens=20)
    assert (
        text_of(await events(pair.split, prompt_of(33), **ask, max_tokens=20))
        == (whole["choices"][0]["text"])
    )


async def test_b21_split_and_fused_give_the_same_tokens(pair: Pair) -> None:
    lengths = (1, 2, 3, 15, 16, 17, 31, 32, 33, 47, 48, 49, 64, 65, 100, 128, 200, 255, 256, 300)
    ask: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    for length in lengths:
        bodies = [await pair.both(prompt_of(length), **ask, max_tokens=count) for count in (1, 2, 16)]
        one, two, many = (body["choices"][0]["token_ids"] for body in bodies)
        assert (one, two) == (many[:1], many[:2])
        told = await events(pair.split, prompt_of(length), **ask, max_tokens=16)
        streamed = [id_ for event in told for choice in event["choices"] for id_ in choice["token_ids"]]
        assert streamed == many


async def test_b23_a_seed_is_the_same_everywhere(pair: Pair) -> None:
    ask: dict[str, Any] = {"temperature": 1, "ignore_eos": True, "return_token_ids": True, "max_tokens": 16}
    seen = [(await pair.both(prompt_of(50), **ask, seed=seed)) for seed in (7, 7, 8)]
    ids = [body["choices"][0]["token_ids"] for body in seen]
    assert ids[0] == ids[1] != ids[2]


async def test_b27_what_cannot_fit_is_refused_before_any_token(pair: Pair) -> None:
    for cluster in (pair.split, pair.fused):
        for length in (CONTEXT + 1, CONTEXT, NUM_BLOCKS * 16 + 1):
            asked = time.monotonic()
            body = {"model": MODEL, "prompt": prompt_of(length), "max_tokens": 4, "stream": True}
            answer = await cluster.http.post(f"{cluster.url}/v1/completions", json=body)
            assert answer.status_code == 400, length
            assert answer.json()["error"]["code"] == "context_length_exceeded"
            assert time.monotonic() - asked < 1.0
        capped = await cluster.complete(prompt_of(10), max_tokens=CONTEXT - 9, temperature=0, stop="\x00")
        assert capped["usage"]["total_tokens"] <= CONTEXT
        await cluster.idle()


async def test_c24_seeds_side_by_side(pair: Pair) -> None:
    ask: dict[str, Any] = {"temperature": 1, "max_tokens": 8, "ignore_eos": True, "return_token_ids": True}

    async def ids_of(seed: int) -> list[int]:
        ids: list[int] = (await pair.split.complete(prompt_of(24), **ask, seed=seed))["choices"][0][
            "token_ids"
        ]
        return ids

    alone = {seed: await ids_of(seed) for seed in (1, 2)}
    assert alone[1] != alone[2]
    for _ in range(20):
        first, second = await asyncio.gather(ids_of(1), ids_of(2))
        assert (first, second) == (alone[1], alone[2])


async def test_c26_log_probabilities_cover_every_token(pair: Pair) -> None:
    ask = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    ask |= {"logprobs": True, "top_logprobs": 3, "temperature": 0, "ignore_eos": True}
    ask |= {"logit_bias": PRINTABLE}
    answers = []
    for cluster in (pair.split, pair.fused):
        answer = await cluster.http.post(f"{cluster.url}/v1/chat/completions", json=ask)
        [choice] = answer.raise_for_status().json()["choices"]
        content = choice["logprobs"]["content"]
        assert "".join(entry["token"] for entry in content) == choice["message"]["content"]
        assert [len(entry["top_logprobs"]) for entry in content] == [3] * 4
        assert all(entry["logprob"] <= 0 for entry in content)
        assert all(bytes(entry["bytes"]).decode() == entry["token"] for entry in content)
        answers.append(content)
    for split, fused in zip(*answers, strict=True):
        assert split["token"] == fused["token"]
        assert abs(split["logprob"] - fused["logprob"]) < 1e-2


async def test_c32_several_choices_of_one_prompt(pair: Pair) -> None:
    ask: dict[str, Any] = {"n": 3, "temperature": 1, "seed": 1, "max_tokens": 8, "ignore_eos": True}
    async with asyncio.timeout(10):
        body = await pair.both(prompt_of(40), **ask, return_token_ids=True)
        told = await events(pair.split, prompt_of(40), **ask)
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert {choice["finish_reason"] for choice in body["choices"]} == {"length"}
    assert len({tuple(choice["token_ids"]) for choice in body["choices"]}) == 3
    assert body["usage"]["completion_tokens"] == 24
    assert [reasons_of(told, index) for index in range(3)] == [["length"]] * 3
    assert [text_of(told, index) for index in range(3)] == [choice["text"] for choice in body["choices"]]
    refused = ask | {"model": MODEL, "prompt": "x", "best_of": 2}
    answer = await pair.split.http.post(f"{pair.split.url}/v1/completions", json=refused)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "best_of")


async def test_d70_thirty_two_equal_questions_have_equal_answers(pair: Pair) -> None:
    async def ask() -> list[int]:
        return await pair.split.greedy(prompt_of(60), 12)

    answers = await at_a_time(32, [ask] * 32)
    assert len(answers) == 32
    assert len({tuple(answer) for answer in answers}) == 1


async def test_timing_names_who_served(pair: Pair) -> None:
    body = {"model": MODEL, "prompt": prompt_of(40), "max_tokens": 8, "ignore_eos": True}
    headers = {"X-Galley-Timing": "1", "X-Galley-TTFT-Ms": "500"}
    for cluster, names in ((pair.split, ("prefill-0", "decode-0")), (pair.fused, ("decode-0", "decode-0"))):
        answer = await cluster.http.post(f"{cluster.url}/v1/completions", json=body, headers=headers)
        timing = answer.raise_for_status().json()["galley"]
        assert (timing["prefill"], timing["decode"]) == names
        assert 0 < timing["prefill_ms"] <= timing["ttft_ms"]
        assert timing["queue_ms"] >= 0
        assert timing["tpot_ms"] > 0
        assert (timing["transfer_ms"] is not None) == (cluster is pair.split)
