"""Greedy tokens are those of transformers.generate, whatever process computed which part of them.

Real processes, float32, through the gateway over HTTP; disaggregated, the KV travels over real UCX.
"""

import random
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from common.config import Topology
from common.engine.prepare_model import prepare
from common.model_files import DEFAULT_CACHE_DIR, DEFAULT_MODEL
from tests.support.following import follow
from tests.support.real_cluster import at_a_time, real_cluster
from tests.support.reference import Expected, generate
from tests.support.tiny_models import SPECIAL, make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

NUM_OUTPUT = 32
CONCURRENT = 16
BEGINNINGS = (600, 257, 256, 255, 144, 143, 129, 128, 127, 65, 64, 63, 48, 33, 32, 31, 17, 16, 15, 2)
"""Lengths of prompts that are beginnings of one text: they have blocks in common. A block is 16 tokens."""
OWN_TEXTS = (1, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 79, 80, 81, 95, 96, 97, 112)
"""Lengths of prompts that have nothing in common."""
TOPOLOGIES: tuple[Topology, ...] = ("disaggregated", "chunked", "colocated")
"""The two that mix these, with one model: test_topologies.py."""
MODELS = ("default", "llama", "qwen3", "mistral", "gemma3", "gpt_neox")
TEXT = Path(__file__).parents[1] / "data" / "compose-spec.LICENSE"
TINY_IDS = range(len(SPECIAL), 259)


@dataclass(frozen=True, slots=True)
class Case:
    directory: Path
    expected: list[Expected]


def default_model() -> tuple[Path, list[int]]:
    directory = prepare(DEFAULT_MODEL, DEFAULT_CACHE_DIR, lambda _line: None)
    text: list[int] = AutoTokenizer.from_pretrained(directory)(TEXT.read_text())["input_ids"]
    return directory, text


def tiny_model(kind: str, directory: Path) -> tuple[Path, list[int]]:
    text = random.Random(kind).choices(TINY_IDS, k=sum(OWN_TEXTS) + max(BEGINNINGS))
    return make_tiny_model(kind, directory), text


def prompts_of(text: list[int]) -> list[tuple[int, ...]]:
    prompts = [tuple(text[:length]) for length in BEGINNINGS]
    start = max(BEGINNINGS)
    for length in OWN_TEXTS:
        prompts.append(tuple(text[start : start + length]))
        start += length
    assert [len(prompt) for prompt in prompts] == [*BEGINNINGS, *OWN_TEXTS]
    return prompts


@pytest.fixture(scope="module", params=MODELS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    kind: str = request.param
    directory, text = (
        default_model() if kind == "default" else tiny_model(kind, tmp_path_factory.mktemp(kind))
    )
    return Case(directory, generate(directory, prompts_of(text), NUM_OUTPUT))


def test_there_is_something_to_get_wrong(case: Case) -> None:
    """A model that repeats one token would hide most faults."""
    assert len({expected.tokens for expected in case.expected}) == len(case.expected) >= 40
    assert sum(len(set(expected.tokens)) for expected in case.expected) / len(case.expected) >= 8


def test_hardly_any_position_is_a_tie(case: Case) -> None:
    ways = [len(right) for expected in case.expected for right in expected.right]
    assert len(ways) == len(case.expected) * NUM_OUTPUT
    assert sum(number > 1 for number in ways) <= len(ways) / 100


@pytest.mark.parametrize("topology", TOPOLOGIES)
async def test_tokens_are_those_of_generate(case: Case, topology: Topology, tmp_path: Path) -> None:
    prompt_tokens = sum(len(expected.prompt) for expected in case.expected)
    async with real_cluster(case.directory, tmp_path, topology=topology) as cluster:
        await at_a_time(CONCURRENT, [partial(follow, cluster, expected) for expected in case.expected])
        decode = await cluster.metrics("decode")
        received = decode.total("galley_kv_received_tokens_total")
        shared = decode.total("galley_prefix_cache_hit_tokens_total")
        computed = decode.total("galley_prompt_tokens_computed_total")
    if topology == "disaggregated":
        assert received + shared >= prompt_tokens
        assert 0 < received < prompt_tokens
        assert computed == 0
    else:
        assert received == 0
        assert computed > 0
