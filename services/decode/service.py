"""The decode worker: handoffs in, KV pulled when there is room, tokens out; whole jobs too when sent them.

Wires an intake for handoffs and an engine. Knows nothing of models, sockets and routing.
"""

from collections.abc import Sequence as Seq
from functools import partial
from itertools import count

import structlog

from common.engine.engine import Engine
from common.engine.runner import BatchPlan
from common.engine.scheduler import StepOutput
from common.engine.sequence import Sequence
from common.errors import GalleyError
from common.ids import BlockId, InstanceRef, SequenceId
from common.kv.block_pool import BlockPool
from common.kv.importer import PullResult
from common.messages.cluster import LoadReport
from common.messages.generation import Accepted, Job, Refused
from common.messages.handoff import KVHandoff
from common.messages.stream import DecodingItem, PrefillStats, TokenLogprobs, TokensItem
from common.runtime.bus import Reply
from common.runtime.host import Parts
from common.runtime.items import finish_item, prompt_items, tokens_item
from common.runtime.load import load_of
from common.runtime.meters import StepMeter
from common.runtime.prefix_sharing import PrefixSharing
from common.runtime.worker import Held, Worker
from common.transport.control import Subscription
from services.decode.decoding import Decoding
from services.decode.intake import HandoffIntake

log = structlog.get_logger()


class DecodeService:
    """A Worker's duty and an Engine's sink."""

    def __init__(self, parts: Parts, worker: Worker, pool: BlockPool) -> None:
        self._parts = parts
        self._worker = worker
        self._pool = pool
        self._layout = parts.runner.layout
        self._fingerprint = parts.fingerprint
        self._max_queued_tokens = parts.settings.max_queued_tokens
        self._engine: Engine
        self._meter: StepMeter
        self._by_seq: dict[SequenceId, Decoding] = {}
        self._numbers = count(1)
        self._sharing: PrefixSharing
        self._intake: HandoffIntake
        self._handoffs: Subscription

    def attach(self, engine: Engine) -> None:
        """The engine whose sink this is; before the first job."""
        self._engine = engine
        self._meter = StepMeter(self._worker.metrics, engine.scheduler)
        self._sharing = PrefixSharing(self._parts, self._worker, engine.scheduler)
        self._intake = HandoffIntake(
            self._parts, self._worker, engine.scheduler, self._arrived, partial(self._worker.fail, self)
        )

    async def start(self) -> None:
        bus, name = self._worker.bus, self._worker.me.instance
        self._handoffs = await bus.subscribe(bus.subjects.handoff(name), self._on_handoff, KVHandoff)

    async def run(self) -> None:
        await self._sharing.run()

    async def close(self) -> None:
        await self._handoffs.unsubscribe()
        await self._intake.close()

    # --- duty -------------------------------------------------------------------------------------

    def submit(self, job: Job) -> Refused | None:
        queued = self._engine.scheduler.queued_tokens + self._num_waiting_tokens
        tokens = [*job.prompt_ids, *job.output_ids]
        if queued and queued + len(tokens) > self._max_queued_tokens:
            return Refused("full", f"{queued} tokens are queued already")
        now = self._worker.clock.now()
        held = Decoding(job.key, job.gateway, now + job.time_left_s, now)
        held.seq = self._sequence(job, tokens, held)
        try:
            self._engine.scheduler.check(held.seq)
        except GalleyError as error:
            return Refused("invalid", error.message)
        self._worker.hold(held)
        self._sharing.fetch(held.seq, partial(self._decode, held, held.seq))
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
        waiting = self._num_waiting_tokens
        if waiting and waiting + handoff.num_tokens > self._max_queued_tokens:
            return reply(Refused("full", f"{waiting} tokens wait for room already"))
        now = self._worker.clock.now()
        held = Decoding(handoff.key, handoff.gateway, now + handoff.time_left_s, now, handoff)
        self._worker.hold(held)
        tokens = [*handoff.prompt_ids, *handoff.output_ids]
        reply(Accepted())
        seq = self._sequence(handoff, tokens, held)
        self._sharing.fetch(seq, partial(self._intake.add, held, seq), whole=True)
        return None

    def end(self, held: Held) -> None:
        assert isinstance(held, Decoding)
        self._sharing.discard(held.key)
        self._intake.discard(held)
        if held.seq and self._by_seq.pop(held.seq.id, None):
            self._engine.abort(held.seq.id)
        self._intake.admit()

    def load(self) -> LoadReport:
        waiting = len(self._intake) + len(self._sharing)
        return load_of(self._engine, waiting_for_kv=waiting, waiting_tokens=self._num_waiting_tokens)

    @property
    def _num_waiting_tokens(self) -> int:
        """Tokens of what has not got as far as the engine."""
        return self._intake.num_waiting_tokens + self._sharing.num_tokens

    def tick(self) -> None:
        self._intake.admit()

    def died(self, ref: InstanceRef) -> None:
        """A pull from a dead prefill ends by itself: its endpoint breaks or stays silent."""

    # --- decoding ---------------------------------------------------------------------------------

    def _arrived(self, held: Decoding, result: PullResult, blocks: list[BlockId]) -> None:
        """The KV of a handoff is here, in `blocks`."""
        handoff, first = held.handoff, result.final.choices[0]
        assert handoff is not None
        if first.finish is not None:
            self._pool.release(blocks)
            self._worker.done(held)
            return
        seq = self._sequence(handoff, [*handoff.prompt_ids, *handoff.output_ids, first.token], held)
        seq.blocks, seq.num_computed, seq.names = blocks, handoff.num_tokens, held.names
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
        self._decode(held, seq)

    def _decode(self, held: Decoding, seq: Sequence) -> None:
        """Give `seq` to the engine, with the blocks that it holds."""
        try:
            self._engine.add(seq)
        except GalleyError as error:
            self._pool.release(seq.blocks)
            self._worker.fail(self, held, error)
            return
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
        held = self._by_seq.get(seq.id)
        if held and held.handoff is None and not held.told_stats:
            held.num_offered = self._sharing.computed(seq, seq.blocks, held.num_offered)

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
        self._intake.admit()

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
