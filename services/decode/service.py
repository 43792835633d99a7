"""The decode worker: handoffs in, KV pulled when there is room, tokens out; whole jobs too when sent them.

Wires a KV importer and an engine. Knows nothing of models, sockets and routing.
"""

import asyncio
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from itertools import count

import structlog

from common.engine.engine import Engine
from common.engine.runner import BatchPlan
from common.engine.scheduler import StepOutput
from common.engine.sequence import Sequence
from common.errors import GalleyError, KVTransferError
from common.ids import BlockId, InstanceRef, SequenceId
from common.kv.block_pool import BlockPool
from common.kv.importer import KVImporter, PullResult
from common.messages.cluster import LoadReport
from common.messages.generation import Accepted, Job, Refused
from common.messages.handoff import KVHandoff
from common.messages.stream import DecodingItem, PrefillStats, TokenLogprobs, TokensItem
from common.observability.timeline import Stage
from common.runtime.bus import Reply
from common.runtime.host import Parts
from common.runtime.items import finish_item, prompt_items, tokens_item
from common.runtime.meters import StepMeter
from common.runtime.worker import Held, Worker
from common.transport.control import Subscription
from services.decode.handoff_queue import HandoffQueue

log = structlog.get_logger()


@dataclass(slots=True, eq=False)
class Decoding(Held):
    """| stage    | seq  | pull | leaves by                                                  |
    |----------|------|------|------------------------------------------------------------|
    | waiting  | none | none | room in the pool (only with a handoff)                     |
    | pulling  | none | set  | FINAL and every block; or a transfer error (retryable)     |
    | decoding | set  | done | finish                                                     |

    A whole job starts at `decoding`. Any stage ends by abort, failure, deadline.
    """

    received: float
    handoff: KVHandoff | None = None
    reserved: list[BlockId] = field(default_factory=list)
    pull: asyncio.Task[None] | None = None
    seq: Sequence | None = None
    started: float | None = None
    """When the engine took up a whole job; None before, and for a handoff."""
    told_stats: bool = False

    @property
    def stage(self) -> Stage:
        if self.seq is None:
            return "waiting_for_kv"
        if self.handoff is None and self.started is None:
            return "queued"
        return "decoding" if self.seq.num_computed >= self.seq.num_prompt else "prefilling"


class DecodeService:
    """A Worker's duty and an Engine's sink."""

    def __init__(self, parts: Parts, worker: Worker, pool: BlockPool) -> None:
        settings = parts.settings
        self._worker = worker
        self._pool = pool
        self._layout = parts.runner.layout
        self._fingerprint = parts.fingerprint
        self._max_num_seqs = settings.max_num_seqs
        self._max_queued_tokens = settings.max_queued_tokens
        self._importer = KVImporter(
            transport=parts.transport,
            buffer=parts.runner.buffer,
            layout=parts.runner.layout,
            fingerprint=parts.fingerprint,
            me=parts.ref,
            clock=parts.clock,
            kv_timeout_s=settings.kv_timeout_s,
            release=pool.release,
        )
        self._engine: Engine
        self._meter: StepMeter
        self._by_seq: dict[SequenceId, Decoding] = {}
        self._numbers = count(1)
        self._waiting: HandoffQueue[Decoding]
        self._pulls: set[Decoding] = set()
        self._handoffs: Subscription
        parts.metrics.kv_blocks_quarantined.set_function(lambda: self._importer.num_quarantined)

    def attach(self, engine: Engine) -> None:
        """The engine whose sink this is; before the first job."""
        self._engine = engine
        self._meter = StepMeter(self._worker.metrics, engine.scheduler)
        self._waiting = HandoffQueue(engine.scheduler.ordering)

    async def start(self) -> None:
        bus, name = self._worker.bus, self._worker.me.instance
        self._handoffs = await bus.subscribe(bus.subjects.handoff(name), self._on_handoff, KVHandoff)

    async def run(self) -> None:
        """Nothing: every pull is a task of the worker's."""

    async def close(self) -> None:
        await self._handoffs.unsubscribe()
        await self._importer.close()

    # --- duty -------------------------------------------------------------------------------------

    def submit(self, job: Job) -> Refused | None:
        queued = self._engine.scheduler.queued_tokens + self._waiting.num_tokens
        tokens = [*job.prompt_ids, *job.output_ids]
        if queued and queued + len(tokens) > self._max_queued_tokens:
            return Refused("full", f"{queued} tokens are queued already")
        now = self._worker.clock.now()
        held = Decoding(job.key, job.gateway, now + job.time_left_s, now)
        seq = self._sequence(job, tokens, held)
        try:
            self._decode(held, seq)
        except GalleyError as error:
            return Refused("invalid", error.message)
        self._worker.hold(held)
        return None

    def _on_handoff(self, handoff: KVHandoff, reply: Reply) -> None:
        """Take a handoff into the queue for KV, or answer why not."""
        known = self._worker.held.get(handoff.key)
        if isinstance(known, Decoding) and known.handoff and _newer(handoff, known.handoff):
            self._worker.drop(known)
            self.end(known)
        elif answer := self._worker.refusal(handoff.key, handoff.grant.reader):
            return reply(answer)
        if handoff.fingerprint != self._fingerprint:
            log.error("fingerprints differ", ours=self._fingerprint, theirs=handoff.fingerprint)
            return reply(Refused("mismatch", "KV layout or weights differ from this instance's"))
        if self._layout.blocks_for(handoff.num_tokens + 1) > self._pool.num_blocks:
            return reply(Refused("invalid", f"{handoff.num_tokens} tokens never fit this pool"))
        waiting = self._waiting.num_tokens
        if waiting and waiting + handoff.num_tokens > self._max_queued_tokens:
            return reply(Refused("full", f"{waiting} tokens wait for room already"))
        now = self._worker.clock.now()
        held = Decoding(handoff.key, handoff.gateway, now + handoff.time_left_s, now, handoff)
        self._worker.hold(held)
        tokens = [*handoff.prompt_ids, *handoff.output_ids]
        self._waiting.add(held, self._sequence(handoff, tokens, held))
        reply(Accepted())
        self._admit()
        return None

    def end(self, held: Held) -> None:
        assert isinstance(held, Decoding)
        self._waiting.discard(held)
        if held.pull:
            held.pull.cancel()
            self._pulled(held)
            self._pool.release(held.reserved)  # a pull that has not begun
        if held.seq and self._by_seq.pop(held.seq.id, None):
            self._engine.abort(held.seq.id)
        self._admit()

    def load(self) -> LoadReport:
        scheduler = self._engine.scheduler
        waiting = self._waiting.num_tokens
        return LoadReport(
            requests_queued=scheduler.num_waiting,
            requests_running=scheduler.num_running,
            requests_waiting_for_kv=len(self._waiting) + len(self._pulls),
            queued_tokens=scheduler.queued_tokens + waiting,
            running_tokens=scheduler.running_tokens,
            free_blocks=self._pool.num_free,
            step_ms=self._engine.last_step_ms,
        )

    def tick(self) -> None:
        self._admit()

    def died(self, ref: InstanceRef) -> None:
        """A pull from a dead prefill ends by itself: its endpoint breaks or stays silent."""

    # --- pulling ----------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Start pulls, in the engine's order, while the pool has room for them."""
        while self._waiting:
            held = self._waiting.next()
            assert held.handoff is not None
            num_tokens = held.handoff.num_tokens
            if not self._room_for(num_tokens):
                return
            self._waiting.admit(held)
            held.reserved = self._pool.allocate(self._layout.blocks_for(num_tokens))
            held.pull = self._worker.spawn(self._pull(held, held.handoff))
            self._pulls.add(held)

    def _room_for(self, num_tokens: int) -> bool:
        """Whether a prompt and its next step fit beside what those who decode or pull will want soon."""
        scheduler = self._engine.scheduler
        busy = scheduler.num_running + len(self._pulls)
        if busy >= self._max_num_seqs or scheduler.num_waiting:
            return False
        soon = scheduler.headroom + len(self._pulls)
        return self._layout.blocks_for(num_tokens + 1) + soon <= self._pool.num_free

    async def _pull(self, held: Decoding, handoff: KVHandoff) -> None:
        blocks, held.reserved = held.reserved, []  # the importer frees them if it fails
        try:
            left = held.deadline - self._worker.clock.now()
            result = await self._importer.pull(replace(handoff, time_left_s=left), blocks)
        except KVTransferError as error:
            self._pulled(held)
            self._worker.metrics.kv_transfer_failures.inc()
            self._worker.fail(self, held, error)
            return
        self._pulled(held)
        self._count(result, handoff)
        first = result.final.choices[0]
        if first.finish is not None:
            self._pool.release(blocks)
            self._worker.done(held)
            return
        seq = self._sequence(handoff, [*handoff.prompt_ids, *handoff.output_ids, first.token], held)
        seq.blocks, seq.num_computed = blocks, handoff.num_tokens
        token = TokensItem(
            held.key,
            len(handoff.output_ids),
            (first.token,),
            (first.logprobs,) if first.logprobs else (),
            result.final.prefill,
        )
        decoding = DecodingItem(held.key, result.final.age_s * 1e3, result.num_bytes)
        self._worker.emit(held.gateway, decoding)
        self._worker.emit(held.gateway, token)
        try:
            self._decode(held, seq)
        except GalleyError as error:
            self._pool.release(blocks)
            self._worker.fail(self, held, error)

    def _pulled(self, held: Decoding) -> None:
        held.pull = None
        self._pulls.discard(held)

    def _count(self, result: PullResult, handoff: KVHandoff) -> None:
        metrics = self._worker.metrics
        metrics.kv_transfer_bytes(result.transport).inc(result.num_bytes)
        metrics.kv_transfer_seconds.observe(result.final.age_s)
        metrics.kv_received_tokens.inc(handoff.num_tokens)

    # --- decoding ---------------------------------------------------------------------------------

    def _decode(self, held: Decoding, seq: Sequence) -> None:
        """Raises GalleyError when the sequence can never run here."""
        self._engine.add(seq)
        held.seq = seq
        self._by_seq[seq.id] = held

    def _sequence(self, work: Job | KVHandoff, tokens: list[int], held: Decoding) -> Sequence:
        return Sequence(
            id=SequenceId(next(self._numbers)),
            key=work.key,
            tokens=tokens,
            num_prompt=len(work.prompt_ids),
            sampling=work.sampling,
            arrival=held.received - work.age_s,
            deadline=held.deadline,
            priority=work.priority,
            slo=work.slo,
            cache_salt=work.cache_salt,
        )

    def started(self, seq: Sequence) -> None:
        self._by_seq[seq.id].started = self._worker.clock.now()
        self._meter.admitted(seq)

    def executed(self, plan: BatchPlan) -> None:
        self._meter.count(plan)

    def progressed(self, seq: Sequence) -> None:
        """Nobody waits for the KV of a decode."""

    def scored(self, seq: Sequence, index: int, logprobs: Seq[TokenLogprobs]) -> None:
        if held := self._by_seq.get(seq.id):
            for item in prompt_items(seq, index, logprobs):
                self._worker.emit(held.gateway, item)

    def stepped(self, outputs: Seq[StepOutput]) -> None:
        for output in outputs:
            held = self._by_seq[output.seq.id]
            self._worker.emit(held.gateway, tokens_item(output, self._stats(held, output)))
            if output.finish:
                self._worker.emit(held.gateway, finish_item(output))
                del self._by_seq[output.seq.id]
                self._worker.done(held)
        self._admit()

    def failed(self, seq: Sequence, error: GalleyError) -> None:
        held = self._by_seq.pop(seq.id, None)
        if held:
            self._worker.fail(self, held, error)

    def _stats(self, held: Decoding, output: StepOutput) -> PrefillStats | None:
        """For the first token of a prompt that was computed here."""
        if held.started is None or held.told_stats:
            return None
        held.told_stats = True
        now = self._worker.clock.now()
        queued = held.started - held.received
        return PrefillStats(output.seq.num_cached, queued * 1e3, (now - held.started) * 1e3)


def _newer(handoff: KVHandoff, than: KVHandoff) -> bool:
    """Whether the prefill has bound the lease anew since, which revoked the older generation."""
    return handoff.grant.generation > than.grant.generation
