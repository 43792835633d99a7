"""Echoed prompts and their log probabilities, through the official client and real processes.

Against log_softmax of transformers' own logits in float32.
"""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM

from common.config import Topology
from tests.support.real_cluster import MODEL, real_cluster
from tests.support.tiny_models import make_tiny_model, make_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LETTERS = "abcdefghijklmnopqrstuvwxyz .,"
LENGTHS = (1, 2, 17, 900)
"""The longest, with twenty alternatives a token, fills several frames."""
ASKED: dict[str, Any] = {
    "model": MODEL,
    "echo": True,
    "logprobs": 20,
    "extra_body": {"ignore_eos": True},
}


@pytest.mark.parametrize("topology", get_args(Topology))
async def test_scores_are_transformers_own(topology: Topology, tmp_path: Path) -> None:
    directory = make_tiny_model("llama", tmp_path / "model", seed=5)
    tokenizer = make_tokenizer()
    texts = ["".join(random.Random(length).choices(LETTERS, k=length)) for length in LENGTHS]
    prompts = [tokenizer.encode(text) for text in texts]
    async with real_cluster(directory, tmp_path, topology=topology) as cluster:
        client = openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0)
        async with client:
            for text, prompt in zip(texts, prompts, strict=True):
                reference = scores_of(directory, prompt)
                alone = await ask(client, prompt, max_tokens=0)
                check(alone, text, reference)
                assert alone["usage"] == {"prompt_tokens": len(prompt), "completion_tokens": 0} | {
                    "total_tokens": len(prompt),
                    "prompt_tokens_details": {"cached_tokens": 0},
                }
                both = await ask(client, text, max_tokens=3, temperature=0)
                plain = await ask(client, prompt, max_tokens=3, temperature=0, echo=False)
                said = plain["choices"][0]
                check(both, text, reference, said)
                unscored = await ask(client, prompt, max_tokens=3, temperature=0, logprobs=None)
                assert unscored["choices"][0]["text"] == text + said["text"]
                assert await stream(client, prompt, max_tokens=3, temperature=0) == both["choices"][0]
            await two_choices_of_two_prompts(client, texts[1:3])
        await cluster.idle()


async def ask(client: openai.AsyncOpenAI, prompt: Any, **fields: Any) -> Any:
    asked = ASKED | {"prompt": prompt}
    answer = await client.completions.create(**asked | fields)
    return answer.model_dump(exclude_unset=True)


async def stream(client: openai.AsyncOpenAI, prompt: Any, **fields: Any) -> dict[str, Any]:
    """The only choice, put together from its chunks."""
    asked = ASKED | {"prompt": prompt}
    whole: dict[str, Any] = {"index": 0, "text": "", "logprobs": {}, "finish_reason": None}
    async for chunk in await client.completions.create(**asked | fields, stream=True):
        [choice] = chunk.model_dump(exclude_unset=True)["choices"]
        whole["text"] += choice["text"]
        whole["finish_reason"] = choice["finish_reason"] or whole["finish_reason"]
        for key, entries in (choice["logprobs"] or {}).items():
            whole["logprobs"].setdefault(key, []).extend(entries)
    return whole


def scores_of(directory: Path, prompt: Sequence[int]) -> torch.Tensor:
    """`[tokens, vocab]`, row i for what follows token i."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.inference_mode():
        table: torch.Tensor = model(torch.tensor([list(prompt)])).logits[0].log_softmax(-1)
    return table


def check(body: Any, text: str, reference: torch.Tensor, said: Any = None) -> None:
    """That the choice is `text`, scored as `reference` says, and then what was `said` without an echo."""
    [choice] = body["choices"]
    found, number = choice["logprobs"], len(text)
    assert choice["text"] == text + (said["text"] if said else "")
    assert choice["finish_reason"] == "length"
    assert found["tokens"][:number] == list(text)
    assert found["text_offset"][:number] == list(range(number))
    assert found["token_logprobs"][0] is None
    assert found["top_logprobs"][0] is None
    ids = make_tokenizer().encode(text)
    for position in range(1, number):
        line = reference[position - 1]
        assert found["token_logprobs"][position] == pytest.approx(float(line[ids[position]]), abs=1e-3)
        best = found["top_logprobs"][position]
        assert max(best.values()) == pytest.approx(float(line.max()), abs=1e-3)
        assert text[position] in best
    if said is None:
        assert len(found["tokens"]) == number
        return
    assert found["tokens"][number:] == said["logprobs"]["tokens"]
    assert found["token_logprobs"][number:] == pytest.approx(said["logprobs"]["token_logprobs"], abs=1e-3)


async def two_choices_of_two_prompts(client: openai.AsyncOpenAI, texts: list[str]) -> None:
    body = await ask(client, texts, n=2, max_tokens=2, logprobs=0)
    for choice in body["choices"]:
        text = texts[choice["index"] // 2]
        assert choice["text"].startswith(text)
        assert len(choice["logprobs"]["tokens"]) == len(text) + 2
