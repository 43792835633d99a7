"""Whatever the order of events: right tokens, every sequence ends, no block is lost.

FakeRunner's tokens depend on every byte of KV in the pool, so that a block shared, freed or overwritten at
the wrong moment shows as a wrong token.
"""

from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from common.clock import VirtualClock
from common.engine.ordering import make_ordering
from common.engine.policy import DecodeFirst, PrefillFirst, SchedulingPolicy
from common.engine.prefill_rate import PrefillRate
from common.engine.runner import BatchPlan, StepResult
from common.engine.runner_fake import FakeModel, FakeRunner
from common.engine.scheduler import StepOutput
from common.engine.sequence import Sequence
from common.ids import SequenceId
from common.kv.layout import KVLayout
from common.messages.generation import SamplingParams
from tests.support.leaks import assert_pool_idle
from tests.support.sequences import make_scheduler, make_sequence

Urgency = tuple[int, float | None]

MODEL = FakeModel(KVLayout(1, 1, 4, 2, "float32"), vocab_size=11, eos_token_ids=(3,), max_model_len=40)
NUM_BLOCKS = 8

policies: st.SearchStrategy[SchedulingPolicy] = st.one_of(
    st.just(PrefillFirst()), st.builds(DecodeFirst, st.integers(1, 9))
)
urgencies = st.tuples(st.integers(-1, 1), st.sampled_from([None, 0.5, 5.0]))
"""Priority and TTFT budget."""
orderings = st.sampled_from(["fcfs", "shortest_first", "slack", "priority"])
heads = st.sampled_from([[], [1] * 4, [1] * 8, [0, 1] * 4])
tails = st.lists(st.integers(0, 1), min_size=1, max_size=6)
prompts = st.builds(lambda head, tail: head + tail, heads, tails)
samplings = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 25),
    seed=st.integers(0, 2**63 - 1),
    temperature=st.sampled_from([0.0, 1.0]),
    min_tokens=st.integers(0, 2),
    ignore_eos=st.booleans(),
)


class SchedulerMachine(RuleBasedStateMachine):
    """Adds (fresh, resumed, handing over, imported), aborts, leases, and plans completed in any order."""

    @initialize(
        policy=policies,
        cached=st.booleans(),
        max_num_seqs=st.integers(1, 5),
        budget=st.integers(1, 24),
        ordering=orderings,
        headroom=st.integers(0, 8),
    )
    def begin(
        self,
        policy: SchedulingPolicy,
        cached: bool,
        max_num_seqs: int,
        budget: int,
        ordering: str,
        headroom: int,
    ) -> None:
        self.clock = VirtualClock()
        self.scheduler = make_scheduler(
            MODEL,
            NUM_BLOCKS,
            policy,
            cached=cached,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            ordering=make_ordering(ordering, self.clock, PrefillRate()),
            headroom_tokens=headroom,
        )
        self.runner = FakeRunner(MODEL, NUM_BLOCKS)
        self.plans: deque[BatchPlan] = deque()
        self.results: dict[int, StepResult] = {}
        self.live: dict[SequenceId, Sequence] = {}
        self.expected: dict[SequenceId, list[int]] = {}
        self.leases: list[list[int]] = []
        self.count = 0

    @rule(
        prompt=prompts,
        sampling=samplings,
        hand_over=st.booleans(),
        resumed=st.integers(0, 4),
        age=st.integers(0, 9),
        urgency=urgencies,
    )
    def add(
        self,
        prompt: list[int],
        sampling: SamplingParams,
        hand_over: bool,
        resumed: int,
        age: int,
        urgency: Urgency,
    ) -> None:
        seq = self._make(prompt, sampling, hand_over, age, urgency)
        output = self.expected[seq.id]
        seq.tokens += output[: min(resumed, len(output) - 1)]
        self._add(seq)

    @rule(seconds=st.floats(0, 2))
    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule(
        prompt=prompts, sampling=samplings, headroom=st.booleans(), age=st.integers(0, 9), urgency=urgencies
    )
    def import_kv(
        self, prompt: list[int], sampling: SamplingParams, headroom: bool, age: int, urgency: Urgency
    ) -> None:
        """What a decode does: reserve blocks, receive bytes, go on with the first token."""
        seq = self._make(prompt, sampling, False, age, urgency)
        pool = self.scheduler.pool
        wanted = pool.blocks_for(len(prompt) + headroom)
        if len(self.expected[seq.id]) < 2 or not pool.can_allocate(wanted):
            return
        elsewhere = make_scheduler(MODEL, NUM_BLOCKS)
        far = FakeRunner(MODEL, NUM_BLOCKS)
        twin = make_sequence(0, prompt, sampling, hand_over=True)
        sources = elsewhere.pool.allocate(elsewhere.pool.blocks_for(len(prompt)))
        twin.blocks = list(sources)
        elsewhere.add(twin)
        while (plan := elsewhere.plan()) is not None:
            elsewhere.complete(plan, far.execute(plan))
        seq.blocks = pool.allocate(wanted)
        for source, target in zip(sources, seq.blocks, strict=False):
            self.runner.buffer.block(target)[:] = far.buffer.block(source)
        seq.tokens.append(self.expected[seq.id][0])
        seq.num_computed = len(prompt)
        self._add(seq)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        seq_id = data.draw(st.sampled_from(sorted(self.live)))
        assert self.scheduler.abort(seq_id)
        assert not self.scheduler.abort(seq_id)
        del self.live[seq_id]

    @precondition(lambda self: len(self.plans) < 4)
    @rule(now=st.booleans())
    def plan(self, now: bool) -> None:
        plan = self.scheduler.plan()
        if plan is None:
            return
        assert plan.rows
        rows = [row.seq for outstanding in (*self.plans, plan) for row in outstanding.rows]
        assert len(rows) == len(set(rows))
        self.plans.append(plan)
        if now:
            self._execute(plan)

    @precondition(lambda self: self.plans)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        self._complete(data.draw(st.sampled_from(list(self.plans))))

    @precondition(lambda self: self.plans)
    @rule()
    def fail(self) -> None:
        plan = self.plans[-1]
        if plan.step not in self.results:
            self.plans.pop()
            for seq in self.scheduler.fail(plan):
                del self.live[seq.id]

    @precondition(lambda self: self.scheduler.pool.num_free > 0 and len(self.leases) < 2)
    @rule()
    def lease(self) -> None:
        self.leases.append(list(self.scheduler.pool.allocate(1)))

    @precondition(lambda self: self.leases)
    @rule()
    def end_lease(self) -> None:
        self.scheduler.pool.release(self.leases.pop())  # type: ignore[arg-type]

    @invariant()
    def blocks_add_up(self) -> None:
        held = {block for seq in self.live.values() for block in seq.blocks}
        held.update(block for lease in self.leases for block in lease)  # type: ignore[misc]
        assert held <= set(range(NUM_BLOCKS))
        assert len(held) <= self.scheduler.pool.num_used
        if not self.plans:
            assert len(held) == self.scheduler.pool.num_used

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        while self.leases:
            self.end_lease()
        for _ in range(10_000):
            if self.scheduler.is_empty:
                break
            plan = self.scheduler.plan()
            if plan is not None:
                self.plans.append(plan)
            self._complete(self.plans[0])
        assert self.scheduler.is_empty
        assert not self.live
        assert_pool_idle(self.scheduler.pool)

    def _make(
        self, prompt: list[int], sampling: SamplingParams, hand_over: bool, age: int, urgency: Urgency
    ) -> Sequence:
        self.count += 1
        seq = make_sequence(
            self.count,
            prompt,
            sampling,
            arrival=self.clock.now() - age,
            hand_over=hand_over,
            priority=urgency[0],
            ttft_s=urgency[1],
        )
        output = MODEL.expected_tokens(prompt, sampling)
        # Alone in the pool, a sequence ends one token after the pool is full.
        self.expected[seq.id] = output[: NUM_BLOCKS * 4 + 1 - len(prompt)]
        return seq

    def _add(self, seq: Sequence) -> None:
        self.scheduler.add(seq)
        self.live[seq.id] = seq

    def _execute(self, plan: BatchPlan) -> None:
        """Plans are executed in the order they were made, whatever the order of completion."""
        for earlier in self.plans:
            if earlier.step <= plan.step and earlier.step not in self.results:
                self.results[earlier.step] = self.runner.execute(earlier)

    def _complete(self, plan: BatchPlan) -> None:
        self._execute(plan)
        self.plans.remove(plan)
        for output in self.scheduler.complete(plan, self.results.pop(plan.step)):
            expected = self.expected[output.seq.id]
            assert output.token == expected[output.index]
            last = output.index == len(expected) - 1
            assert (output.finish is not None) == last
            assert output.handed_over == (output.seq.hand_over and not last)
            if last or output.handed_over:
                del self.live[output.seq.id]


SchedulerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestScheduler = SchedulerMachine.TestCase


Work = tuple[list[int], int, int, Urgency]
"""Prompt, output tokens, the step at which it comes, and how urgent it is."""

works = st.lists(
    st.tuples(prompts, st.integers(1, 25), st.integers(0, 60), urgencies), min_size=1, max_size=8
)


class Workload:
    """Sequences that come at their steps, each step half a second long, and what became of them."""

    def __init__(
        self,
        work: list[Work],
        ordering: str,
        policy: SchedulingPolicy,
        num_blocks: int,
        max_num_seqs: int,
        headroom_tokens: int = 0,
    ) -> None:
        self.model = FakeModel(MODEL.layout)
        self.clock = VirtualClock()
        self.scheduler = make_scheduler(
            self.model,
            num_blocks,
            policy,
            ordering=make_ordering(ordering, self.clock, PrefillRate()),
            max_num_seqs=max_num_seqs,
            headroom_tokens=headroom_tokens,
        )
        self.runner = FakeRunner(self.model, num_blocks)
        self.work = dict(enumerate(sorted(work, key=lambda one: one[2])))
        self.arrivals = deque(self.work.items())
        self.tokens: dict[int, list[int]] = {number: [] for number in self.work}
        self.steps = 0

    @property
    def is_over(self) -> bool:
        return not self.arrivals and self.scheduler.is_empty

    def arrive(self) -> bool:
        """Add those whose time has come; whether there were any."""
        before = len(self.arrivals)
        while self.arrivals and self.arrivals[0][1][2] <= self.steps:
            number, (prompt, length, _, (priority, ttft_s)) = self.arrivals.popleft()
            self.scheduler.add(
                make_sequence(
                    number,
                    prompt,
                    SamplingParams(max_tokens=length, seed=0),
                    arrival=self.clock.now(),
                    priority=priority,
                    ttft_s=ttft_s,
                )
            )
        return len(self.arrivals) < before

    def step(self) -> tuple[BatchPlan | None, list[StepOutput]]:
        self.steps += 1
        self.clock.advance(0.5)
        plan = self.scheduler.plan()
        assert plan is not None or self.scheduler.is_empty
        if plan is None:
            return None, []
        outputs = self.scheduler.complete(plan, self.runner.execute(plan))
        for output in outputs:
            self.tokens[output.seq.id].append(output.token)
        return plan, outputs


@given(
    work=works,
    ordering=orderings,
    policy=policies,
    num_blocks=st.integers(12, 24),
    max_num_seqs=st.integers(1, 6),
    headroom_tokens=st.integers(0, 8),
)
def test_a_short_pool_costs_time_but_neither_tokens_nor_ends(
    work: list[Work],
    ordering: str,
    policy: SchedulingPolicy,
    num_blocks: int,
    max_num_seqs: int,
    headroom_tokens: int,
) -> None:
    """Each block that a sequence grows by preempts those after it, once at most: no end of preemptions."""
    load = Workload(work, ordering, policy, num_blocks, max_num_seqs, headroom_tokens)
    grown = sum(length // MODEL.layout.block_size + 1 for _, length, *_ in work)
    for _ in range(5000):
        if load.is_over:
            break
        load.arrive()
        load.step()
    assert load.is_over
    assert load.tokens == {
        number: load.model.expected_tokens(prompt, SamplingParams(max_tokens=length, seed=0))
        for number, (prompt, length, *_) in load.work.items()
    }
    assert load.scheduler.num_preemptions <= grown * (len(work) - 1)
    assert_pool_idle(load.scheduler.pool)


@given(
    work=works,
    ordering=orderings,
    policy=policies,
    num_blocks=st.integers(8, 24),
    max_num_seqs=st.integers(1, 6),
)
def test_the_horizon_keeps_its_promise(
    work: list[Work], ordering: str, policy: SchedulingPolicy, num_blocks: int, max_num_seqs: int
) -> None:
    load = Workload(work, ordering, policy, num_blocks, max_num_seqs)
    scheduler = load.scheduler
    promised, rows, preemptions = 0, 0, 0
    while not load.is_over:
        if load.arrive() or promised == 0:  # nobody promised that nobody comes
            promised, rows = scheduler.horizon(), scheduler.num_running
            preemptions = scheduler.num_preemptions
        plan, outputs = load.step()
        if promised:
            promised -= 1
            assert plan is not None
            assert [row.count for row in plan.rows] == [1] * rows
            assert len(outputs) == rows
            assert scheduler.admitted == ()
            assert scheduler.num_preemptions == preemptions
            if promised:
                assert all(output.finish is None for output in outputs)
