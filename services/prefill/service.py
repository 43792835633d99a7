"""The prefill worker: jobs in, first tokens out, and the KV handed over to a decode.

Wires an engine whose sequences end after one token to a KV exporter. Decode is chosen when the engine
starts a prompt, so that its chunks travel while the next ones are computed. Knows nothing of models,
sockets and how a route is found.
"""

import asyncio
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import partial
from itertools import count

import structlog

from common.engine.engine import Engine
from common.engine.runner import BatchPlan
from common.engine.scheduler import StepOutput
from common.engine.sequence import Sequence
from common.errors import (
    ControlTimeout,
    DeadlineExceeded,
    GalleyError,
    KVTransferError,
    NoInstance,
    WorkerFailed,
)
from common.ids import AttemptKey, BlockId, InstanceRef, LeaseId, SequenceId
from common.kv.block_pool import BlockPool
from common.kv.exporter import KVExporter
from common.kv.lease import LEASE_STATES, LeaseState
from common.kv.wire import FinalResult, FirstToken
from common.messages.cluster import LoadReport
from common.messages.generation import (
    Abort,
    AbortReason,
    Accepted,
    DecodeRouteRequest,
    Job,
    Refused,
)
from common.messages.handoff import KVHandoff, LeaseGrant
from common.messages.stream import BoundItem, PrefillStats, TokenLogprobs
from common.observability.timeline import Stage
from common.runtime.host import Parts
from common.runtime.items import finish_item, prompt_items, tokens_item
from common.runtime.load import load_of
from common.runtime.meters import ExportMeter, StepMeter
from common.runtime.prefix_sharing import PrefixSharing
from common.runtime.worker import Held, Worker, labels
from services.prefill.handover import choose_decode, handoff_of, offer

log = structlog.get_logger()


@dataclass(slots=True, eq=False)
class Prefilling(Held):
    """| stage    | lease | decode | leaves by                                             |
    |----------|-------|--------|-------------------------------------------------------|
    | loading  | none  | none   | what the KV pool has of its prefix is here; at once without a pool |
    | queued   | none  | none   | started                                               |
    | binding  | open  | none, or the one asked | handoff accepted; or finished at the first token |
    | bound    | bound | set    | the reader's acknowledgement; or death of the decode  |

    A job that can only yield one token stays without lease and decode. Any stage ends by abort, failure,
    deadline. `decode` is set from the offer on.
    """

    job: Job
    seq: Sequence
    received: float
    started: float = 0.0
    lease: LeaseId | None = None
    decode: InstanceRef | None = None
    blocks: tuple[BlockId, ...] = ()
    """Of its prompt, once started."""
    num_offered: int = 0
    """How many of them were offered to the KV pool."""
    sampled: bool = False
    binding: asyncio.Task[None] | None = None

    @property
    def stage(self) -> Stage:
        if self.sampled:
            return "waiting_for_kv"
        return "prefilling" if self.started else "queued"

    def stats(self, now: float) -> PrefillStats:
        """What the prompt took, at its first token."""
        queued = self.started - self.received
        return PrefillStats(self.seq.num_cached, queued * 1e3, (now - self.started) * 1e3)


class PrefillService:
    """A Worker's duty and an Engine's sink."""

    def __init__(self, parts: Parts, worker: Worker, pool: BlockPool) -> None:
        settings = parts.settings
        self._parts = parts
        # UCX listens on every address, so there is always a key; who issues a token alone checks it.
        secret = settings.secret.get_secret_value() or parts.ids.hex(32)
        self._worker = worker
        self._pool = pool
        self._transport = parts.transport
        self._max_model_len = parts.runner.max_model_len
        self._max_queued_tokens = settings.max_queued_tokens
        self._compression = settings.kv_compression
        self._exporter = KVExporter(
            transport=parts.transport,
            buffer=parts.runner.buffer,
            layout=parts.runner.layout,
            fingerprint=parts.fingerprint,
            me=parts.ref,
            clock=parts.clock,
            ids=parts.ids,
            secret=secret.encode(),
            release=pool.release,
            kv_timeout_s=settings.kv_timeout_s,
            metrics=ExportMeter(parts.metrics),
            codecs=parts.runner.kv_codecs,
            gone=self._lease_gone,
        )
        self._engine: Engine
        self._meter: StepMeter
        self._sharing: PrefixSharing
        self._by_seq: dict[SequenceId, Prefilling] = {}
        self._numbers = count(1)
        self._ticked = asyncio.Event()
        for state in LEASE_STATES:
            parts.metrics.leases(state).set_function(partial(self._leases_in, state))

    def attach(self, engine: Engine) -> None:
        """The engine whose sink this is; before the first job."""
        self._engine = engine
        self._meter = StepMeter(self._worker.metrics, engine.scheduler)
        self._sharing = PrefixSharing(self._parts, self._worker, engine.scheduler)

    async def start(self) -> None:
        await self._transport.listen(self._exporter.serve)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._exporter.run())
            tasks.create_task(self._sharing.run())

    async def close(self) -> None:
        await self._exporter.close()

    # --- duty -------------------------------------------------------------------------------------

    def submit(self, job: Job) -> Refused | None:
        if job.decode is None and not _one_token(job, self._max_model_len):
            return Refused("invalid", "a prefill instance hands over, but the job names no decode")
        queued = self._engine.scheduler.queued_tokens + self._sharing.num_tokens
        tokens = [*job.prompt_ids, *job.output_ids]
        if queued and queued + len(tokens) > self._max_queued_tokens:
            return Refused("full", f"{queued} tokens are queued already")
        now = self._worker.clock.now()
        seq = Sequence(
            id=SequenceId(next(self._numbers)),
            key=job.key,
            tokens=tokens,
            num_prompt=len(job.prompt_ids),
            sampling=job.sampling,
            arrival=now - job.age_s,
            deadline=now + job.time_left_s,
            priority=job.priority,
            slo=job.slo,
            cache_salt=job.cache_salt,
            hand_over=True,
        )
        try:
            self._engine.scheduler.check(seq)
        except GalleyError as error:
            return Refused("invalid", error.message)
        held = Prefilling(job.key, job.gateway, seq.deadline, job, seq, now)
        self._by_seq[seq.id] = held
        self._worker.hold(held)
        self._sharing.fetch(seq, partial(self._enqueue, held))
        return None

    def _enqueue(self, held: Prefilling) -> None:
        try:
            self._engine.add(held.seq)
        except GalleyError as error:
            self._worker.fail(self, held, error)

    def end(self, held: Held) -> None:
        assert isinstance(held, Prefilling)
        self._sharing.discard(held.key)
        if self._by_seq.pop(held.seq.id, None):
            self._engine.abort(held.seq.id)
        if held.binding:
            held.binding.cancel()
        if held.lease is not None:
            self._exporter.abort(held.key)
        if held.decode:
            self._abort_decode(held, held.decode, "superseded")

    def load(self) -> LoadReport:
        waiting = self._worker.count("waiting_for_kv") + len(self._sharing)
        return load_of(self._engine, waiting_for_kv=waiting, waiting_tokens=self._sharing.num_tokens)

    def tick(self) -> None:
        self._ticked.set()

    def died(self, ref: InstanceRef) -> None:
        for held in list(self._worker.held.values()):
            if isinstance(held, Prefilling) and held.decode == ref:
                held.decode = None
                self._worker.fail(self, held, WorkerFailed(f"decode {ref.instance} died"))
        self._exporter.reader_dead(ref)

    # --- sink -------------------------------------------------------------------------------------

    def started(self, seq: Sequence) -> None:
        held = self._by_seq[seq.id]
        held.started = self._worker.clock.now()
        held.blocks = tuple(seq.blocks)
        self._meter.admitted(seq)
        if _one_token(held.job, self._max_model_len):
            self._worker.emit(held.gateway, BoundItem(held.key, None))
            return
        self._pool.retain(seq.blocks)
        held.lease = self._exporter.start(
            held.key, held.blocks, len(seq.tokens), held.deadline, seq.num_cached
        )
        held.binding = self._worker.spawn(self._bind(held, held.lease))

    def executed(self, plan: BatchPlan) -> None:
        self._meter.count(plan)

    def progressed(self, seq: Sequence) -> None:
        held = self._by_seq.get(seq.id)
        if held and held.lease is not None:
            self._exporter.advance(held.lease, seq.num_computed)
        if held:
            held.num_offered = self._sharing.computed(seq, held.blocks, held.num_offered)

    def scored(self, seq: Sequence, index: int, logprobs: Seq[TokenLogprobs]) -> None:
        if held := self._by_seq.get(seq.id):
            for item in prompt_items(seq, index, logprobs):
                self._worker.emit(held.gateway, item)

    def stepped(self, outputs: Seq[StepOutput]) -> None:
        for output in outputs:
            held = self._by_seq.pop(output.seq.id)
            held.sampled = True
            stats = held.stats(self._worker.clock.now())
            self._worker.emit(held.gateway, tokens_item(output, stats))
            if output.finish or held.lease is None:
                self._worker.emit(held.gateway, finish_item(output))
                self._worker.done(held)
                self.end(held)
            else:
                token = FirstToken(held.key.choice, output.token, output.logprobs)
                self._exporter.finish(held.lease, FinalResult((token,), stats))

    def failed(self, seq: Sequence, error: GalleyError) -> None:
        held = self._by_seq.pop(seq.id, None)
        if held:
            self._worker.fail(self, held, error)

    def _lease_gone(self, key: AttemptKey) -> None:
        """A lease has ended that we did not end: its reader has everything, or its time was over."""
        held = self._worker.held.get(key)
        if not isinstance(held, Prefilling):
            return
        if self._worker.clock.now() >= held.deadline:
            self._worker.fail(self, held, DeadlineExceeded("the request's time is over"))
            return
        if held.binding:
            held.binding.cancel()  # the decode took it, only its answer got lost
        self._worker.done(held)

    def _leases_in(self, state: LeaseState) -> float:
        return self._exporter.leases[state]

    # --- handing over -----------------------------------------------------------------------------

    async def _bind(self, held: Prefilling, lease: LeaseId) -> None:
        """Find a decode that takes the handoff; while all are full, the KV waits here (design.md 4.6)."""
        gone: list[InstanceRef] = []
        full: list[InstanceRef] = []
        none_left: GalleyError = NoInstance("no decode instance takes the request")
        while True:
            decode = await self._choose(held, (*gone, *full))
            if decode is None and not full:
                self._worker.fail(self, held, none_left)
                return
            if decode is None:
                full.clear()
                await self._next_tick()
                continue
            try:
                grant = self._exporter.bind(lease, decode)
            except KVTransferError as error:
                # Somebody has FINAL and may be decoding; who that is was not to be found out.
                self._worker.fail(self, held, error)
                return
            held.decode = decode
            answer = await offer(self._worker.bus, decode, self._handoff(held, grant))
            if isinstance(answer, Accepted):
                self._worker.emit(held.gateway, BoundItem(held.key, decode))
                return
            held.decode = None
            log.info("handoff not taken", **labels(held.key), decode=decode.instance, answer=answer)
            if isinstance(answer, GalleyError):
                self._abort_decode(held, decode, "rebound")
            if isinstance(answer, ControlTimeout):
                none_left = WorkerFailed(f"{decode.instance} did not answer the handoff")  # it may yet
            is_full = isinstance(answer, Refused) and answer.reason == "full"
            (full if is_full else gone).append(decode)

    async def _choose(self, held: Prefilling, exclude: tuple[InstanceRef, ...]) -> InstanceRef | None:
        request = DecodeRouteRequest(
            held.key,
            self._worker.me,
            len(held.seq.tokens),
            held.job.sampling.max_tokens - len(held.job.output_ids),
            exclude,
        )
        return await choose_decode(self._worker.bus, request, held.job.decode)

    def _handoff(self, held: Prefilling, grant: LeaseGrant) -> KVHandoff:
        now = self._worker.clock.now()
        job = replace(held.job, time_left_s=held.deadline - now, age_s=now - held.seq.arrival)
        return handoff_of(job, grant, self._exporter, self._parts.fingerprint, self._compression)

    def _abort_decode(self, held: Prefilling, decode: InstanceRef, reason: AbortReason) -> None:
        left = held.deadline - self._worker.clock.now()
        self._worker.abort_elsewhere(decode, Abort(held.key, max(left, 0.0), reason))

    async def _next_tick(self) -> None:
        """Until the next beat, when other instances' loads have had time to change."""
        self._ticked.clear()
        await self._ticked.wait()


def _one_token(job: Job, max_model_len: int) -> bool:
    """Whether the job ends at its next token whatever that is: then there is nothing to hand over."""
    done = len(job.output_ids)
    return job.sampling.max_tokens - done <= 1 or len(job.prompt_ids) + done + 1 >= max_model_len
