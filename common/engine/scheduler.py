"""The life of sequences inside an engine: taken in, planned, advanced by results, gone.

A core without I/O, shared by workers and the planner's simulator: plans go out, results come in, blocks are
taken and given back. What a step is made of is the StepPlanner's choice. Knows nothing of models and where a
sequence came from. In the spirit of nano-vllm's scheduler; continuous batching is Orca's, preemption by
recompute vLLM's.
"""

from collections.abc import Collection
from dataclasses import dataclass

from common.engine.block_tables import BlockTables
from common.engine.entry import Entry, State
from common.engine.limits import Limits
from common.engine.ordering import Fcfs, Ordering, rank_of
from common.engine.policy import SchedulingPolicy
from common.engine.runner import BatchPlan, PlanRow, SampledToken, StepResult
from common.engine.running import HEADROOM_TOKENS, RunningSet
from common.engine.sequence import Sequence
from common.engine.step_planner import StepPlanner
from common.engine.waiting import WaitingLine
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


class Scheduler:
    """Advances sequences within a token budget, in the order that `ordering` gives them; FCFS by default.

    | state     | event                           | next                                               |
    |-----------|---------------------------------|----------------------------------------------------|
    | -         | add                             | waiting; with blocks in hand (imported KV): running |
    | waiting   | plan: blocks for all its tokens | in flight                                          |
    | running   | plan: its share of the step     | in flight                                          |
    | running   | plan: one before it lacks blocks | waiting, to recompute (a `hand_over` one: never)  |
    | in flight | complete                        | running; at its end: gone                          |
    | in flight | fail                            | gone                                               |
    | in flight | abort                           | doomed                                             |
    | doomed    | complete, fail                  | gone                                               |
    | waiting, running | abort                    | gone                                               |

    Gone means: blocks released, nothing remembered. A sequence is in at most one outstanding plan. A waiting
    one holds no blocks, so that nobody sits on some while waiting for others. A decode that finds no block
    and nobody after it to preempt keeps its KV and waits: somebody before it has the blocks, or somebody
    outside (a lease, an import), and either will end. The first in rank is never preempted, and a rank only
    changes to the better (at the first token, or by age), so everybody ends. Each block that a sequence grows
    by preempts at most those after it. Age counts from arrival at the gateway.
    """

    def __init__(
        self,
        pool: BlockPool,
        prefix_cache: PrefixCache | None,
        policy: SchedulingPolicy,
        ordering: Ordering | None = None,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        eos_token_ids: Collection[int] = (),
        headroom_tokens: int = HEADROOM_TOKENS,
    ) -> None:
        self.pool = pool
        self._tables = BlockTables(pool, prefix_cache)
        self.ordering = ordering or Fcfs()
        self._limits = Limits(max_model_len, pool.num_blocks * pool.block_size, frozenset(eos_token_ids))
        self._entries: dict[SequenceId, Entry] = {}
        self._waiting = WaitingLine(self.ordering)
        self._running = RunningSet(self._tables, self._limits, headroom_tokens)
        self._planner = StepPlanner(
            self._tables, policy, self._waiting, self._running, max_num_seqs, max_num_batched_tokens
        )
        self._outstanding: dict[int, BatchPlan] = {}
        self._gone: list[SequenceId] = []
        self._step = 0

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
        return self._waiting.num_tokens + self._running.num_prefill_tokens

    @property
    def running_tokens(self) -> int:
        """Tokens whose KV is held."""
        return self._running.num_tokens

    @property
    def headroom(self) -> int:
        """Blocks that those who hold some will want soon; whoever comes new leaves these free."""
        return self._running.headroom

    @property
    def admitted(self) -> tuple[Sequence, ...]:
        """Sequences that the last plan() gave their first blocks."""
        return self._planner.admitted

    @property
    def num_preemptions(self) -> int:
        return self._planner.num_preemptions

    @property
    def num_recomputed_tokens(self) -> int:
        return self._planner.num_recomputed_tokens

    @property
    def is_empty(self) -> bool:
        return not self._entries

    def find(self, seq_id: SequenceId) -> Sequence | None:
        """The sequence of this id, unless unknown, gone or aborted."""
        entry = self._entries.get(seq_id)
        return None if entry is None or entry.state is State.DOOMED else entry.seq

    def check(self, seq: Sequence) -> None:
        """Raises what `add` raises for a sequence that can never run here, which Limits.check tells."""
        self._limits.check(seq)

    def add(self, seq: Sequence) -> None:
        """Take charge of `seq` and of the blocks it holds; they have the KV of its first num_computed tokens.

        Raises what Limits.check raises; the blocks then stay the caller's.
        """
        if seq.id in self._entries:
            raise ValueError(f"sequence {seq.id} is here already")
        if not 0 <= seq.num_computed <= len(seq.blocks) * self.pool.block_size:
            raise ValueError(f"sequence {seq.id}: no blocks for its {seq.num_computed} computed tokens")
        self._limits.check(seq)
        rank = rank_of(seq, self.ordering.key(seq, self._tables.uncomputed(seq)))
        entry = self._entries[seq.id] = Entry(seq, rank)
        if seq.blocks:
            entry.state = State.RUNNING
            self._running.add(entry)
        else:
            self._waiting.add(entry)

    def abort(self, seq_id: SequenceId) -> bool:
        """End a sequence; blocks are released at once, or when its outstanding plan completes.

        False when there is none (any more).
        """
        entry = self._entries.get(seq_id)
        if entry is None or entry.state is State.DOOMED:
            return False
        if entry.state is State.IN_FLIGHT:
            entry.state = State.DOOMED
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
        rows = self._planner.rows()
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
        return self._planner.horizon()

    def _land(self, plan: BatchPlan) -> list[tuple[Entry, PlanRow]]:
        """Rows of an outstanding plan whose sequences are still wanted; the doomed are dropped here."""
        if self._outstanding.pop(plan.step, None) is not plan:
            raise ValueError(f"step {plan.step} is not outstanding")
        landed = []
        for row in plan.rows:
            entry = self._entries[row.seq]
            if entry.state is State.DOOMED:
                self._drop(entry)
            else:
                entry.state = State.RUNNING
                landed.append((entry, row))
        return landed

    def _extend(self, entry: Entry, sampled: SampledToken) -> StepOutput:
        seq = entry.seq
        seq.tokens.append(sampled.token)
        finish = "stop" if sampled.ends else self._limits.finish(seq)
        handed_over = seq.hand_over and finish is None
        if finish is not None or handed_over:
            self._drop(entry)
        elif seq.num_output == 1 and not entry.senior:
            # It streams now, which some orderings put before everything else.
            self._running.move(entry, rank_of(seq, self.ordering.key(seq, seq.num_uncomputed)))
        return StepOutput(seq, seq.num_output - 1, sampled.token, sampled.logprobs, finish, handed_over)

    def _drop(self, entry: Entry) -> None:
        del self._entries[entry.seq.id]
        self._gone.append(entry.seq.id)
        (self._waiting if entry.state is State.WAITING else self._running).remove(entry)
        self._tables.release(entry.seq)
