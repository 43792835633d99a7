"""What the next step computes: who advances by how much, who gets blocks, and who loses them for it.

Moves entries between the waiting line and the running set. Knows nothing of results, and nothing of how
sequences come and end: that is the Scheduler's.
"""

from common.engine.block_tables import BlockTables
from common.engine.entry import Entry, State
from common.engine.policy import SchedulingPolicy, TokenBudget
from common.engine.runner import PlanRow
from common.engine.running import RunningSet
from common.engine.sequence import Sequence
from common.engine.waiting import WaitingLine


class StepPlanner:
    """Fills one step after the other within a budget of tokens and sequences, as the policy says.

    Admission stops at the first that does not fit: to let smaller ones pass would starve it.
    """

    def __init__(
        self,
        tables: BlockTables,
        policy: SchedulingPolicy,
        waiting: WaitingLine,
        running: RunningSet,
        max_num_seqs: int,
        max_num_batched_tokens: int,
    ) -> None:
        self._tables = tables
        self._policy = policy
        self._waiting = waiting
        self._running = running
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self.admitted: tuple[Sequence, ...] = ()
        """Sequences that the last rows() gave their first blocks."""
        self.num_preemptions = 0
        self.num_recomputed_tokens = 0

    def rows(self) -> list[PlanRow]:
        """The rows of the next step; their entries are in flight. Empty: nothing can be computed."""
        budget = TokenBudget(self._max_num_batched_tokens, self._max_num_seqs)
        rows: list[PlanRow] = []
        self.admitted = ()
        for phase in self._policy.phases:
            if rows and not self._policy.mixed:
                break
            self._plan_running(phase == "decode", budget, rows)
            if phase == "prefill":
                self._plan_admissions(budget, rows)
        return rows

    def horizon(self) -> int:
        """See Scheduler.horizon."""
        running = len(self._running)
        if running > min(self._max_num_seqs, self._max_num_batched_tokens):
            return 0
        if self._waiting and running < self._max_num_seqs:
            return 0
        return self._running.steady_steps()

    def _plan_running(self, decoding: bool, budget: TokenBudget, rows: list[PlanRow]) -> None:
        for entry in self._running:
            if budget.exhausted:
                return
            # Looked at only when its turn comes: an older one may have preempted it by then.
            if entry.state is State.RUNNING and entry.is_decoding is decoding:
                left = entry.seq.num_uncomputed
                count = 1 if decoding else self._policy.chunk(left, budget.tokens, not rows)
                if count and self._grow(entry):
                    rows.append(_send(entry, count, budget))

    def _plan_admissions(self, budget: TokenBudget, rows: list[PlanRow]) -> None:
        spare = self._running.headroom if self._waiting else 0
        while self._waiting and not budget.exhausted and len(self._running) < self._max_num_seqs:
            entry = self._waiting.next()
            seq = entry.seq
            known = self._tables.known(seq)
            uncomputed = len(seq.tokens) - self._tables.tokens_in(known)
            count = self._policy.chunk(uncomputed, budget.tokens, not rows)
            if not count or not self._tables.fill(seq, known, spare):
                return
            self._admit(entry)
            spare += self._running.growth(seq)
            rows.append(_send(entry, count, budget))

    def _admit(self, entry: Entry) -> None:
        seq = entry.seq
        self._waiting.admit(entry)
        self._running.add(entry)
        if entry.num_lost:
            self.num_recomputed_tokens += max(0, entry.num_lost - seq.num_computed)
        else:
            seq.num_cached = seq.num_computed
            self.admitted += (seq,)

    def _grow(self, entry: Entry) -> bool:
        """Blocks for all tokens of a running sequence, at the cost of those after it."""
        while not self._tables.grow(entry.seq):
            victim = self._running.victim_for(entry)
            if victim is None:
                return False
            self._preempt(victim)
        return True

    def _preempt(self, entry: Entry) -> None:
        self.num_preemptions += 1
        entry.num_lost = entry.seq.num_computed
        entry.seq.num_computed = 0
        self._running.remove(entry)
        self._tables.release(entry.seq)
        entry.state = State.WAITING
        self._waiting.add(entry)


def _send(entry: Entry, count: int, budget: TokenBudget) -> PlanRow:
    budget.spend(count)
    entry.state = State.IN_FLIGHT
    return _row(entry.seq, count)


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
