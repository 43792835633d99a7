"""Sequences and schedulers for engine tests, with everything that a test does not care about filled in."""

from common.engine.ordering import Ordering
from common.engine.policy import DecodeFirst, SchedulingPolicy
from common.engine.runner_fake import FakeModel
from common.engine.scheduler import Scheduler
from common.engine.sequence import Sequence
from common.ids import AttemptKey, RequestId, SequenceId
from common.kv.block_pool import BlockPool
from common.kv.prefix_cache import PrefixCache
from common.messages.generation import SLO, SamplingParams


def make_sequence(
    number: int,
    prompt: list[int],
    sampling: SamplingParams | None = None,
    *,
    arrival: float | None = None,
    hand_over: bool = False,
    choice: int = 0,
    priority: int = 0,
    ttft_s: float | None = None,
) -> Sequence:
    """Sequence `number`, arrived at that time unless told otherwise; 8 greedy tokens by default."""
    return Sequence(
        id=SequenceId(number),
        key=AttemptKey(RequestId(f"request-{number}"), 1, choice),
        tokens=list(prompt),
        num_prompt=len(prompt),
        sampling=sampling or greedy(8),
        arrival=float(number) if arrival is None else arrival,
        deadline=1e9,
        hand_over=hand_over,
        priority=priority,
        slo=None if ttft_s is None else SLO(ttft_s),
    )


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=0, temperature=0.0)


def make_scheduler(
    model: FakeModel,
    num_blocks: int,
    policy: SchedulingPolicy | None = None,
    *,
    cached: bool = False,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    ordering: Ordering | None = None,
    headroom_tokens: int = 0,
) -> Scheduler:
    """A scheduler with a pool of its own for `model`; decodes first, in chunks of 16, by default.

    It leaves no headroom for growth unless told to, so that preemptions are easy to have.
    """
    pool = BlockPool(num_blocks, model.layout.block_size)
    return Scheduler(
        pool,
        PrefixCache(pool, model.layout.fingerprint(model.weights)) if cached else None,
        policy or DecodeFirst(chunk_tokens=16),
        ordering,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=model.max_model_len,
        eos_token_ids=model.eos_token_ids,
        headroom_tokens=headroom_tokens,
    )
