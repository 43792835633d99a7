"""Which tokens of which sequences the next step computes, and what came of the last one.

A core without I/O, shared by workers and the planner's simulator: plans go out, results come in, blocks are
taken and given back. Knows nothing of time, models and where a sequence came from. In the spirit of
nano-vllm's scheduler; continuous batching is Orca's, preemption by recompute vLLM's.
"""

from bisect import insort
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum, auto

from common.engine.block_tables import BlockTables
from common.engine.limits import Limits
from common.engine.policy import SchedulingPolicy, TokenBudget
from common.engine.runner import BatchPlan, PlanRow, SampledToken, StepResult
from common.engine.sequence import Sequence
from common.ids import SequenceId
from common.kv.block_pool import BlockPool
from common.kv.prefix_cache import PrefixCache
from common.messages.stream import FinishReason, TokenLogprobs


@dataclass(frozen=True, slots=True)
class StepOutput:
    """One sampled token: output token `index` of `seq`, counted from the request's first.

    With `finish` or `handed_over` the sequence has left the scheduler and holds no blocks any more.
    """

    seq: Sequence
    index: int
    token: int
    logprobs: TokenLogprobs | None
    finish: FinishReason | None
    handed_over: bool


class _State(Enum):
    WAITING = auto()
    RUNNING = auto()
    IN_FLIGHT = auto()
    DOOMED = auto()


@dataclass(slots=True, eq=False)
class _Entry:
    """A sequence inside the scheduler. `num_lost`: computed tokens that its last preemption threw away."""

    seq: Sequence
    state: _State = _State.WAITING
    num_lost: int = 0

    @property
    def is_decoding(self) -> bool:
        seq = self.seq
        return seq.num_uncomputed == 1 and seq.num_computed >= seq.num_prompt and not seq.hand_over

    @property
    def may_be_preempted(self) -> bool:
        return self.state is _State.RUNNING and not self.seq.hand_over


class Scheduler:
    """Advances sequences within a token budget, oldest first.

    | state     | event                           | next                                               |
    |-----------|---------------------------------|----------------------------------------------------|
    | -         | add                             | waiting; with blocks in hand (imported KV): running |
    | waiting   | plan: blocks for all its tokens | in flight                                          |
    | running   | plan: its share of the step     | in flight                                          |
    | running   | plan: an older one lacks blocks | waiting, to recompute (a `hand_over` one: never)   |
    | in flight | complete                        | running; at its end: gone                          |
    | in flight | fail                            | gone                                               |
    | in flight | abort                           | doomed                                             |
    | doomed    | complete, fail                  | gone                                               |
    | waiting, running | abort                    | gone                                               |

    Gone means: blocks released, nothing remembered. A sequence is in at most one outstanding plan. A waiting
    one holds no blocks, so that nobody sits on some while waiting for others. A decode that finds no block
    and nobody younger to preempt keeps its KV and waits: somebody older has the blocks, or somebody outside
    (a lease, an import), and either will end. Age counts from arrival at the gateway.
    """

    def __init__(
        self,
        pool: BlockPool,
        prefix_cache: PrefixCache | None,
        policy: SchedulingPolicy,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        eos_token_ids: Collection[int] = (),
    ) -> None:
        self.pool = pool
        self._tables = BlockTables(pool, prefix_cache)
        self._policy = policy
        self._limits = Limits(max_model_len, pool.num_blocks * pool.block_size, frozenset(eos_token_ids))
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._entries: dict[SequenceId, _Entry] = {}
        self._waiting: list[_Entry] = []
        self._running: list[_Entry] = []
        self._outstanding: dict[int, BatchPlan] = {}
        self._gone: list[SequenceId] = []
        self._step = 0
        self.admitted: tuple[Sequence, ...] = ()
        """Sequences that the last plan() gave their first blocks."""
        self.num_preemptions = 0
        self.num_recomputed_tokens = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences that hold blocks."""
        return len(self._running)

    @property
    def queued_tokens(self) -> int:
        """Tokens still to be computed before their sequences decode."""
        prefilling = (entry for entry in self._running if not entry.is_decoding)
        return sum(entry.seq.num_uncomputed for entry in (*self._waiting, *prefilling))

    @property
    def running_tokens(self) -> int:
        """Tokens whose KV is held."""
        return sum(entry.seq.num_computed for entry in self._running)

    @property
    def is_empty(self) -> bool:
        return not self._entries

    def find(self, seq_id: SequenceId) -> Sequence | None:
        """The sequence of this id, unless unknown, gone or aborted."""
        entry = self._entries.get(seq_id)
        return None if entry is None or entry.state is _State.DOOMED else entry.seq

    def add(self, seq: Sequence) -> None:
        """Take charge of `seq` and of the blocks it holds; they have the KV of its first num_computed tokens.

        Raises what Limits.check raises; the blocks then stay the caller's.
        """
        if seq.id in self._entries:
            raise ValueError(f"sequence {seq.id} is here already")
        if not 0 <= seq.num_computed <= len(seq.blocks) * self.pool.block_size:
            raise ValueError(f"sequence {seq.id}: no blocks for its {seq.num_computed} computed tokens")
        self._limits.check(seq)
        entry = self._entries[seq.id] = _Entry(seq)
        self._queue(entry, _State.RUNNING if seq.blocks else _State.WAITING)

    def abort(self, seq_id: SequenceId) -> bool:
        """End a sequence; blocks are released at once, or when its outstanding plan completes.

        False when there is none (any more).
        """
        entry = self._entries.get(seq_id)
        if entry is None or entry.state is _State.DOOMED:
            return False
        if entry.state is _State.IN_FLIGHT:
            entry.state = _State.DOOMED
        else:
            self._drop(entry)
        return True

    def abandon(self) -> list[Sequence]:
        """Give up everything, once no plan is being executed any more; returns those not aborted before."""
        lost = [seq for plan in list(self._outstanding.values()) for seq in self.fail(plan)]
        for entry in list(self._entries.values()):
            lost.append(entry.seq)
            self._drop(entry)
        return lost

    def plan(self) -> BatchPlan | None:
        """The next step, or None: nothing can be computed before an add, a completion or a release."""
        budget = TokenBudget(self._max_num_batched_tokens, self._max_num_seqs)
        rows: list[PlanRow] = []
        self.admitted = ()
        for phase in self._policy.phases:
            if rows and not self._policy.mixed:
                break
            self._plan_running(phase == "decode", budget, rows)
            if phase == "prefill":
                self._plan_admissions(budget, rows)
        if not rows:
            return None
        self._step += 1
        plan = self._outstanding[self._step] = BatchPlan(self._step, tuple(rows), tuple(self._gone))
        self._gone.clear()
        return plan

    def complete(self, plan: BatchPlan, result: StepResult) -> list[StepOutput]:
        """Take in what an outstanding plan computed; outputs in the order of its rows. Drops the failed."""
        outputs = []
        for entry, row in self._land(plan):
            if row.seq in result.failed:
                self._drop(entry)
                continue
            entry.seq.num_computed = row.start + row.count
            self._tables.register(entry.seq)
            if row.sample:
                outputs.append(self._extend(entry, result.tokens[row.seq]))
        return outputs

    def fail(self, plan: BatchPlan) -> list[Sequence]:
        """Give up an outstanding plan with all its sequences; returns those not aborted before."""
        landed = [entry for entry, _ in self._land(plan)]
        for entry in landed:
            self._drop(entry)
        return [entry.seq for entry in landed]

    def horizon(self) -> int:
        """How many coming steps are sure to differ only by one more token per sequence; 0 if unsure.

        Counts on nobody adding, aborting, or taking blocks meanwhile, and foresees only lengths, not an EOS
        or stop token. The last step counted may end sequences.
        """
        running = self._running
        if not running or len(running) > min(self._max_num_seqs, self._max_num_batched_tokens):
            return 0
        if self._waiting and len(running) < self._max_num_seqs:
            return 0
        if any(entry.state is not _State.RUNNING or not entry.is_decoding for entry in running):
            return 0
        sequences = [entry.seq for entry in running]
        steps = min(self._limits.length(seq) - len(seq.tokens) for seq in sequences)
        return self._tables.affordable_steps(sequences, steps)

    def _plan_running(self, decoding: bool, budget: TokenBudget, rows: list[PlanRow]) -> None:
        for entry in list(self._running):
            if budget.exhausted:
                return
            # Looked at only when its turn comes: an older one may have preempted it by then.
            if entry.state is _State.RUNNING and entry.is_decoding is decoding:
                left = entry.seq.num_uncomputed
                count = 1 if decoding else self._policy.chunk(left, budget.tokens, not rows)
                if count and self._grow(entry):
                    rows.append(self._send(entry, count, budget))

    def _plan_admissions(self, budget: TokenBudget, rows: list[PlanRow]) -> None:
        while self._waiting and not budget.exhausted and len(self._running) < self._max_num_seqs:
            entry = self._waiting[0]
            seq = entry.seq
            known = self._tables.known(seq)
            uncomputed = len(seq.tokens) - len(known) * self.pool.block_size
            count = self._policy.chunk(uncomputed, budget.tokens, not rows)
            if not count or not self._tables.fill(seq, known):
                return
            self._note_admission(entry)
            self._waiting.remove(entry)
            self._queue(entry, _State.RUNNING)
            rows.append(self._send(entry, count, budget))

    def _note_admission(self, entry: _Entry) -> None:
        seq = entry.seq
        if entry.num_lost:
            self.num_recomputed_tokens += max(0, entry.num_lost - seq.num_computed)
        else:
            seq.num_cached = seq.num_computed
            self.admitted += (seq,)

    def _grow(self, entry: _Entry) -> bool:
        """Blocks for all tokens of a running sequence, at the cost of younger ones."""
        while not self._tables.grow(entry.seq):
            victim = next((other for other in reversed(self._running) if other.may_be_preempted), None)
            if victim is None or _age(victim) <= _age(entry):
                return False
            self._preempt(victim)
        return True

    def _preempt(self, entry: _Entry) -> None:
        self.num_preemptions += 1
        entry.num_lost = entry.seq.num_computed
        entry.seq.num_computed = 0
        self._running.remove(entry)
        self._tables.release(entry.seq)
        self._queue(entry, _State.WAITING)

    def _send(self, entry: _Entry, count: int, budget: TokenBudget) -> PlanRow:
        budget.spend(count)
        entry.state = _State.IN_FLIGHT
        return _row(entry.seq, count)

    def _land(self, plan: BatchPlan) -> list[tuple[_Entry, PlanRow]]:
        """Rows of an outstanding plan whose sequences are still wanted; the doomed are dropped here."""
        if self._outstanding.pop(plan.step, None) is not plan:
            raise ValueError(f"step {plan.step} is not outstanding")
        landed = []
        for row in plan.rows:
            entry = self._entries[row.seq]
            if entry.state is _State.DOOMED:
                self._drop(entry)
            else:
                entry.state = _State.RUNNING
                landed.append((entry, row))
        return landed

    def _extend(self, entry: _Entry, sampled: SampledToken) -> StepOutput:
        seq = entry.seq
        seq.tokens.append(sampled.token)
        finish = "stop" if sampled.ends else self._limits.finish(seq)
        handed_over = seq.hand_over and finish is None
        if finish is not None or handed_over:
            self._drop(entry)
        return StepOutput(seq, seq.num_output - 1, sampled.token, sampled.logprobs, finish, handed_over)

    def _queue(self, entry: _Entry, state: _State) -> None:
        entry.state = state
        insort(self._waiting if state is _State.WAITING else self._running, entry, key=_age)

    def _drop(self, entry: _Entry) -> None:
        del self._entries[entry.seq.id]
        self._gone.append(entry.seq.id)
        (self._waiting if entry.state is _State.WAITING else self._running).remove(entry)
        self._tables.release(entry.seq)


def _age(entry: _Entry) -> tuple[float, int]:
    """Sort key, oldest first."""
    return (entry.seq.arrival, entry.seq.id)


def _row(seq: Sequence, count: int) -> PlanRow:
    return PlanRow(
        seq=seq.id,
        tokens=seq.tokens,
        start=seq.num_computed,
        count=count,
        num_prompt=seq.num_prompt,
        blocks=tuple(seq.blocks),
        sample=count == seq.num_uncomputed,
        choice=seq.key.choice,
        sampling=seq.sampling,
    )
