"""Blocks are named as workers name them, as many as a router wants, prompt and output alike."""

from dataclasses import replace
from itertools import count

from common.clock import VirtualClock
from common.ids import AttemptKey, InstanceId, RequestId
from common.messages.block_hash import BlockHasher, pack
from common.messages.cluster import RouterBeat
from common.messages.generation import RouteRequest, SamplingParams
from common.routing.cluster_view import ClusterView
from services.gateway.block_names import BlockNamer
from services.gateway.choice import ChoiceLife, Envelope
from services.gateway.effects import AskRoute
from services.gateway.request import ChoiceSpec
from tests.support.fleet import info, worker_beat

PROMPT = tuple(range(100))
QUESTION = RouteRequest(AttemptKey(RequestId("r"), 1, 0), InstanceId("g1"), 100, 16)
EXPECTED = BlockHasher("same", 16)
"""The fingerprint and block size of tests/support/fleet.py."""


class Seen:
    """A view of the cluster and the namer that looks at it."""

    def __init__(self, wanted: int = 1024, workers: int = 1) -> None:
        self.clock = VirtualClock()
        self.view = ClusterView(self.clock)
        self.view.observe(RouterBeat(info("router-0", "router", names_blocks=wanted, block_size=0)))
        for number in range(workers):
            self.view.observe(worker_beat(f"d{number}"))
        self.namer = BlockNamer(self.view, self.clock)

    def names(self, prompt: tuple[int, ...], output: tuple[int, ...] = (), salt: str = "") -> str:
        return self.namer.named(AskRoute(QUESTION, prompt, output, salt)).block_hashes


def test_all_full_blocks_are_named_as_workers_do() -> None:
    assert Seen().names(PROMPT) == pack(EXPECTED.hashes(PROMPT))
    assert Seen().names(PROMPT, salt="s") == pack(EXPECTED.hashes(PROMPT, "s"))
    assert Seen().names(PROMPT[:15]) == ""


def test_a_retry_names_prompt_and_output() -> None:
    seen = Seen()
    output = tuple(range(500, 540))
    for _ in range(2):
        assert seen.names(PROMPT, output) == pack(EXPECTED.hashes(PROMPT + output))
        assert seen.names(PROMPT) == pack(EXPECTED.hashes(PROMPT))


def test_no_more_are_named_than_wanted_and_none_unasked() -> None:
    assert Seen(wanted=2).names(PROMPT) == pack(EXPECTED.hashes(PROMPT)[:2])
    assert Seen(wanted=7).names(PROMPT, tuple(range(40))) == pack(
        EXPECTED.hashes(PROMPT + tuple(range(40)))[:7]
    )
    assert Seen(wanted=0).names(PROMPT) == ""
    assert Seen(workers=0).names(PROMPT) == ""
    assert Seen().names(()) == ""


def test_salts_and_prompts_in_turn_do_not_mix() -> None:
    seen = Seen()
    other = tuple(reversed(PROMPT))
    for prompt, salt in ((PROMPT, ""), (other, ""), (other, "a"), (PROMPT, "a"), (PROMPT, "")):
        assert seen.names(prompt, salt=salt) == pack(EXPECTED.hashes(prompt, salt))


def test_a_new_model_is_noticed_and_the_majority_counts() -> None:
    seen = Seen(workers=2)
    assert seen.names(PROMPT) == pack(EXPECTED.hashes(PROMPT))
    for number in range(3):
        seen.view.observe(worker_beat(f"n{number}", fingerprint="new", block_size=32))
    seen.clock.advance(0.3)
    assert seen.names(PROMPT) == pack(BlockHasher("new", 32).hashes(PROMPT))


def test_a_choice_asks_by_its_tokens_unless_the_cache_is_passed_by() -> None:
    plain = SamplingParams(max_tokens=4, seed=0)
    for sampling, expected in ((plain, PROMPT), (replace(plain, prompt_logprobs=0), ())):
        envelope = Envelope(RequestId("r"), InstanceId("g1"), 0.0, 60.0, 4, cache_salt="s")
        life = ChoiceLife(0, ChoiceSpec(0, PROMPT, sampling), envelope, count(1), VirtualClock())
        (ask,) = life.start()
        assert isinstance(ask, AskRoute)
        assert ask.prompt_ids == expected
        assert ask.cache_salt == ("s" if expected else "")
