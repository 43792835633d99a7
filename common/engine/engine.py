"""The loop that keeps a model busy: plan, execute, complete, tell.

Joins a Scheduler, a StepExecutor and an EngineSink. Knows nothing of requests, transports and leases: the
sink does. Everything but the arithmetic happens on the event loop.
"""

import asyncio
from collections.abc import Sequence as Seq
from typing import Protocol

import structlog

from common.clock import Clock
from common.engine.prefill_rate import PrefillRate
from common.engine.runner import BatchPlan, StepExecutor
from common.engine.scheduler import Scheduler, StepOutput
from common.engine.sequence import Sequence
from common.engine.step_times import StepTimes
from common.errors import GalleyError, StepFailed, WorkerFailed
from common.ids import SequenceId
from common.messages.stream import TokenLogprobs

log = structlog.get_logger()

_NEWEST = 0.1
"""What the last sequence that ended counts in the mean residence: the last ten or so make it."""


class EngineSink(Protocol):
    """Who wants to know. Called on the event loop, between steps; may call back into `add` and `abort`."""

    def started(self, seq: Sequence) -> None:
        """Blocks for its whole prompt are in hand, the first num_cached tokens already have their KV.

        Called before its first step is executed, once per sequence, not for imported ones. Whoever wants the
        blocks to outlive the sequence retains them here, by a copy of `seq.blocks`.
        """
        ...

    def executed(self, plan: BatchPlan) -> None:
        """A step has computed all of `plan`; for counting. Before what else is told of the same step."""
        ...

    def progressed(self, seq: Sequence) -> None:
        """The KV of the first `num_computed` tokens is written. Before `stepped` of the same step.

        In the step that ends a sequence its blocks are released already (`seq.blocks` is empty), unless
        retained in `started`.
        """
        ...

    def scored(self, seq: Sequence, index: int, logprobs: Seq[TokenLogprobs]) -> None:
        """Log probabilities of the prompt tokens from `index` on; after `progressed`, before `stepped`.

        Told again where a preempted sequence is computed anew.
        """
        ...

    def stepped(self, outputs: Seq[StepOutput]) -> None:
        """What a step sampled; never empty."""
        ...

    def failed(self, seq: Sequence, error: GalleyError) -> None:
        """The sequence is gone without a finish: its step or itself failed, or the engine closed."""
        ...


class Engine:
    """Runs one Scheduler on one StepExecutor; `run` belongs to the owner's TaskGroup.

    Idles on an event that `add`, `abort` and the pool's releases set: it never polls.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: StepExecutor,
        sink: EngineSink,
        clock: Clock,
        rate: PrefillRate | None = None,
    ) -> None:
        """`rate` is told how long steps take, for an ordering that asks it."""
        self.scheduler = scheduler
        self._rate = rate or PrefillRate()
        self._executor = executor
        self._sink = sink
        self._clock = clock
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._closing = False
        self.last_step_ms = 0.0
        """Duration of the last step, executor's queue included; 0 before the first."""
        self.step_times = StepTimes()
        self.residence_s = 0.0
        """How long sequences that finished lately had held blocks here, on average; 0 before the first."""
        scheduler.pool.on_free(self._wake.set)

    def add(self, seq: Sequence) -> None:
        """Raises what Scheduler.add raises, WorkerFailed once closed; the blocks then stay the caller's."""
        if self._closing:
            raise WorkerFailed("the engine is closed")
        self.scheduler.add(seq)
        if seq.blocks:
            seq.admitted = self._clock.now()
        self._wake.set()

    def abort(self, seq_id: SequenceId) -> bool:
        """End a sequence without a further word to the sink; False when there is none (any more)."""
        aborted = self.scheduler.abort(seq_id)
        self._wake.set()
        return aborted

    async def run(self) -> None:
        """Step until `close`; a failed step costs its sequences, nothing else."""
        self._idle.clear()
        try:
            while not self._closing:
                self._wake.clear()
                plan = self.scheduler.plan()
                if plan is None:
                    await self._wake.wait()
                else:
                    await self._step(plan)
        finally:
            self._idle.set()

    async def close(self) -> None:
        """Let the current step end, then fail what is left and close the executor. Idempotent."""
        self._closing = True
        self._wake.set()
        await self._idle.wait()
        # After a cancelled run the thread may still write into blocks; they are free only after this.
        await self._executor.close()
        for seq in self.scheduler.abandon():
            self._sink.failed(seq, WorkerFailed("the engine was closed"))

    async def _step(self, plan: BatchPlan) -> None:
        begun = self._clock.now()
        for seq in self.scheduler.admitted:
            seq.admitted = begun
            self._sink.started(seq)
        try:
            result = await self._executor.execute(plan)
        except StepFailed as error:
            log.error("step failed", step=plan.step, sequences=len(plan.rows), error=error.message)
            for seq in self.scheduler.fail(plan):
                self._sink.failed(seq, error)
            return
        seconds = self._clock.now() - begun
        self.last_step_ms = seconds * 1e3
        self._rate.observe(plan, seconds)
        self.step_times.observe(plan, seconds)
        self._sink.executed(plan)
        rows = [(row, self.scheduler.find(row.seq)) for row in plan.rows]
        outputs = self.scheduler.complete(plan, result)
        for row, computed in rows:
            if computed is None:
                continue
            if (failure := result.failed.get(computed.id)) is not None:
                self._sink.failed(computed, failure)
                continue
            self._sink.progressed(computed)
            if logprobs := result.scored.get(computed.id):
                self._sink.scored(computed, row.scored.start, logprobs)
        if outputs:
            self._note_residence(outputs)
            self._sink.stepped(outputs)

    def _note_residence(self, outputs: Seq[StepOutput]) -> None:
        now = self._clock.now()
        for output in outputs:
            if output.finish is not None and output.seq.admitted is not None:
                seconds = now - output.seq.admitted
                self.residence_s += _NEWEST * (seconds - self.residence_s) if self.residence_s else seconds
