"""A prompt whose beginning is cached gets the tokens that it gets when it is new: in float32, and faked."""

import random
from dataclasses import dataclass, field
from itertools import count

import pytest
import torch

from common.engine.policy import DecodeFirst, PrefillFirst, SchedulingPolicy
from common.engine.runner import ModelRunner
from common.engine.runner_fake import FakeModel, FakeRunner
from common.engine.runner_torch import TorchRunner
from common.engine.scheduler import Scheduler
from common.engine.sequence import Sequence
from common.ids import BlockId
from common.kv.block_pool import BlockPool
from common.kv.prefix_cache import PrefixCache
from common.messages.generation import SamplingParams
from tests.support.leaks import assert_pool_idle
from tests.support.sequences import make_sequence
from tests.support.tiny_models import VOCAB, make_tiny_model

NUM_BLOCKS = 64
BLOCK = 16
NUM_OUTPUT = 12
HEAD = random.Random(7).choices(range(3, VOCAB), k=100)
POLICIES = [PrefillFirst(), DecodeFirst(chunk_tokens=7), DecodeFirst(chunk_tokens=64)]


@dataclass(eq=False)
class Answer:
    seq: Sequence
    logprobs: list[float] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return self.seq.tokens[self.seq.num_prompt :]


class Server:
    """A scheduler on `runner`, with a pool and a prefix cache of its own."""

    def __init__(self, runner: ModelRunner, policy: SchedulingPolicy, num_blocks: int = NUM_BLOCKS) -> None:
        self.runner = runner
        self.pool = BlockPool(num_blocks, BLOCK)
        self._numbers = count()
        self.scheduler = Scheduler(
            self.pool,
            PrefixCache(self.pool, runner.layout.fingerprint(runner.weights_fingerprint)),
            policy,
            max_num_seqs=8,
            max_num_batched_tokens=96,
            max_model_len=runner.max_model_len,
            headroom_tokens=0,
        )

    def add(self, prompt: list[int], *, salt: str = "", hand_over: bool = False) -> Answer:
        sampling = SamplingParams(max_tokens=NUM_OUTPUT, seed=3, logprobs=0, ignore_eos=True)
        seq = make_sequence(next(self._numbers), prompt, sampling, hand_over=hand_over)
        seq.cache_salt = salt
        self.scheduler.add(seq)
        return Answer(seq)

    def run(self, *answers: Answer) -> None:
        of = {answer.seq.id: answer for answer in answers}
        while (plan := self.scheduler.plan()) is not None:
            for output in self.scheduler.complete(plan, self.runner.execute(plan)):
                assert output.logprobs is not None
                of[output.seq.id].logprobs.append(output.logprobs.logprob)

    def ask(self, prompt: list[int], *, salt: str = "") -> Answer:
        answer = self.add(prompt, salt=salt)
        self.run(answer)
        return answer


@pytest.fixture(scope="module", params=["fake", "llama", "gemma3", "gpt2"])
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    if request.param == "fake":
        return FakeRunner(FakeModel(vocab_size=VOCAB), NUM_BLOCKS)
    torch.set_num_threads(1)
    directory = make_tiny_model(request.param, tmp_path_factory.mktemp(request.param), seed=1)
    return TorchRunner(directory, dtype="float32", block_size=BLOCK, num_blocks=NUM_BLOCKS)


def assert_same(hit: Answer, miss: Answer) -> None:
    assert hit.tokens == miss.tokens
    assert len(set(miss.tokens)) > NUM_OUTPUT // 3
    assert hit.logprobs == pytest.approx(miss.logprobs, abs=1e-4)


def tail(length: int) -> list[int]:
    return random.Random(length).choices(range(3, VOCAB), k=length)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("own", [1, 12, 13, 30])
def test_a_shared_beginning_changes_no_token(runner: ModelRunner, policy: SchedulingPolicy, own: int) -> None:
    prompt = HEAD + tail(own)
    miss = Server(runner, policy).ask(prompt)
    assert miss.seq.num_cached == 0
    warm = Server(runner, policy)
    warm.ask(HEAD + tail(40))
    hit = warm.ask(prompt)
    assert hit.seq.num_cached == 96
    assert_same(hit, miss)


@pytest.mark.parametrize(("length", "cached"), [(16, 0), (17, 16), (95, 80), (96, 80), (97, 96)])
def test_of_a_prompt_known_to_its_end_the_last_token_is_computed(
    runner: ModelRunner, length: int, cached: int
) -> None:
    server = Server(runner, DecodeFirst(chunk_tokens=64))
    miss, hit = server.ask(HEAD[:length]), server.ask(HEAD[:length])
    assert (miss.seq.num_cached, hit.seq.num_cached) == (0, cached)
    assert_same(hit, miss)


def test_what_was_generated_is_cached_too(runner: ModelRunner) -> None:
    server = Server(runner, DecodeFirst(chunk_tokens=64))
    first = server.ask(HEAD[:90])
    follow_up = first.seq.tokens + tail(10)
    hit = server.ask(follow_up)
    assert hit.seq.num_cached == 96
    assert_same(hit, Server(runner, PrefillFirst()).ask(follow_up))


def test_another_salt_never_hits(runner: ModelRunner) -> None:
    server = Server(runner, DecodeFirst(chunk_tokens=64))
    miss = server.ask(HEAD, salt="alice")
    other, none, again = server.ask(HEAD, salt="bob"), server.ask(HEAD), server.ask(HEAD, salt="alice")
    assert [one.seq.num_cached for one in (miss, other, none, again)] == [0, 0, 0, 96]
    for answer in (other, none, again):
        assert_same(answer, miss)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_preempted_and_recomputed_sequences_keep_their_tokens(
    runner: ModelRunner, policy: SchedulingPolicy
) -> None:
    prompts = [HEAD[:48] + tail(n) for n in range(20, 28)]
    expected = [Server(runner, policy).ask(prompt) for prompt in prompts]
    server = Server(runner, policy, num_blocks=14)
    answers = [server.add(prompt) for prompt in prompts]
    server.run(*answers)
    assert server.scheduler.num_preemptions > 0
    assert any(answer.seq.num_cached for answer in answers)
    for answer, miss in zip(answers, expected, strict=True):
        assert answer.tokens == miss.tokens
    assert_pool_idle(server.pool)


def test_a_lease_keeps_its_blocks_while_all_others_are_evicted(runner: ModelRunner) -> None:
    """What a decode still has to pull is neither evicted nor written to, and hits all the while."""
    server = Server(runner, DecodeFirst(chunk_tokens=64), num_blocks=16)
    expected = Server(runner, DecodeFirst(chunk_tokens=64)).ask(HEAD)
    handed = server.add(HEAD, hand_over=True)
    leased = lease_at_start(server, handed)
    content = bytes_of(runner, leased)
    evicted: set[bytes] = set()
    for seed in range(6):
        server.ask(random.Random(seed).choices(range(3, VOCAB), k=120))
        evicted.update(server.pool.take_changes().evicted)
    assert len(evicted) > 20
    assert bytes_of(runner, leased) == content
    again = server.add(HEAD, hand_over=True)
    server.run(again)
    assert again.seq.num_cached == 96
    assert again.tokens == handed.tokens == expected.tokens[:1]
    server.pool.release(leased)
    assert_pool_idle(server.pool)


def lease_at_start(server: Server, answer: Answer) -> list[BlockId]:
    """Run one sequence alone, and retain its blocks from its first step on as a prefill does."""
    leased: list[BlockId] = []
    while (plan := server.scheduler.plan()) is not None:
        if not leased:
            leased = list(answer.seq.blocks)
            server.pool.retain(leased)
        server.scheduler.complete(plan, server.runner.execute(plan))
    return leased


def bytes_of(runner: ModelRunner, blocks: list[BlockId]) -> list[bytes]:
    return [memoryview(runner.buffer.block(block)).tobytes() for block in blocks]  # type: ignore[arg-type]
