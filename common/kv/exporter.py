"""The prefill side of the KV pull: leases out, blocks sent to whoever holds a valid token.

KVExporter joins the lease table, the tokens and the endpoints' sessions (export_session.py). Blocks stay
until their lease has ended and no send reads them; a send that does not end within kv_timeout_s of that
is ended by closing its endpoint. Knows nothing of the engine and of the control plane.
"""

import asyncio
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from common.clock import Clock
from common.errors import KVMismatch, KVRevoked
from common.ids import AttemptKey, BlockId, IdSource, InstanceRef, LeaseId
from common.kv.buffer import KVBuffer
from common.kv.codec import NO_CODECS, PLAIN, Codecs
from common.kv.export_session import ExportPull, ExportSession
from common.kv.layout import KVLayout
from common.kv.lease import LeaseState, LeaseTable
from common.kv.transfer_token import TransferTokens
from common.kv.wire import MAX_BLOCKS, FinalResult, Open
from common.messages.handoff import KVSource, LeaseGrant
from common.transport.kv import KVEndpoint, KVTransport


class ExportMetrics(Protocol):
    """What the exporter counts."""

    def sent(self, num_bytes: int, transport: str) -> None:
        """One block has left."""
        ...

    def failed(self) -> None:
        """A pull was refused or its endpoint broke."""
        ...


class KVExporter:
    """Everything that this process exports. All methods but `serve`, `run` and `close` return at once."""

    def __init__(
        self,
        *,
        transport: KVTransport,
        buffer: KVBuffer,
        layout: KVLayout,
        fingerprint: str,
        me: InstanceRef,
        clock: Clock,
        ids: IdSource,
        secret: bytes,
        release: Callable[[Sequence[BlockId]], None],
        kv_timeout_s: float,
        metrics: ExportMetrics | None = None,
        codecs: Codecs = NO_CODECS,
        gone: Callable[[AttemptKey], None] | None = None,
    ) -> None:
        """`release` gets the blocks of a lease back, then `gone` hears whose; `secret` is the cluster's.

        `codecs` are those of `buffer`.
        """
        self.buffer = buffer
        self.codecs = codecs
        self.clock = clock
        self.kv_timeout_s = kv_timeout_s
        self.table = LeaseTable(clock, ids, release, gone)
        self._transport = transport
        self._layout = layout
        self._fingerprint = fingerprint
        self._tokens = TransferTokens(secret, me)
        self._metrics = metrics
        self._sessions: list[ExportSession] = []
        self._pulls: dict[LeaseId, list[ExportPull]] = {}
        self._owners: dict[tuple[LeaseId, int], ExportSession] = {}
        self._new_deadline = asyncio.Event()

    @property
    def source(self) -> KVSource:
        """Where a handoff says this KV is; the transport must be listening."""
        heads, layers = self._layout.kv_heads, self._layout.num_layers
        return KVSource(self._transport.address, (0, heads), (0, layers))

    @property
    def leases(self) -> dict[LeaseState, int]:
        """Leases by state, for the gauge."""
        return self.table.count()

    def start(
        self, key: AttemptKey, blocks: Sequence[BlockId], num_tokens: int, deadline: float, num_ready: int = 0
    ) -> LeaseId:
        """Lease `blocks`, which the caller has retained for it, until `deadline` on the clock at most.

        `num_ready` counts the tokens whose KV is already written. Raises KVMismatch when the blocks are not
        those of `num_tokens` tokens.
        """
        if len(blocks) != self._layout.blocks_for(num_tokens) or len(blocks) > MAX_BLOCKS:
            raise KVMismatch(f"{len(blocks)} blocks cannot be a lease of {num_tokens} tokens")
        lease = self.table.open(key, blocks, num_tokens, deadline, num_ready)
        self._new_deadline.set()
        return lease

    def bind(self, lease: LeaseId, reader: InstanceRef) -> LeaseGrant:
        """Give the lease to `reader`; earlier readers get REVOKED.

        Raises KVUnknownLease when it has ended, KVRevoked once FINAL was given.
        """
        generation = self.table.bind(lease, reader)
        self._wake([lease])
        return self._tokens.grant(lease, generation, reader, self.table.get(lease, generation).deadline)

    def advance(self, lease: LeaseId, num_ready: int) -> None:
        """The KV of tokens [0, num_ready) is written and may travel."""
        self.table.advance(lease, num_ready)
        self._wake([lease])

    def finish(self, lease: LeaseId, final: FinalResult) -> None:
        """All KV is written, and this is what prefill sampled."""
        self.table.set_final(lease, final)
        self._wake([lease])

    def abort(self, key: AttemptKey) -> bool:
        """End the leases of `key`, whose readers get REVOKED; says whether there were any."""
        ended = self.table.abort(key)
        self._wake(ended)
        return bool(ended)

    def reader_dead(self, reader: InstanceRef) -> list[LeaseId]:
        """End the leases of that incarnation and close its endpoints; returns the leases."""
        ended = self.table.reader_dead(reader)
        self._wake(ended)
        for session in self._sessions:
            if session.reader == reader:
                session.fence()
        return ended

    async def serve(self, endpoint: KVEndpoint) -> None:
        """Answer one reader until its endpoint breaks; pass this to `transport.listen`."""
        session = ExportSession(self, endpoint)
        self._sessions.append(session)
        try:
            await session.run()
        finally:
            self._sessions.remove(session)
            self._owners = {k: owner for k, owner in self._owners.items() if owner is not session}

    async def run(self) -> None:
        """End leases at their deadlines; runs until cancelled."""
        while True:
            self._new_deadline.clear()
            self._wake(self.table.expire(self.clock.now()))
            due = self.table.next_deadline()
            wait_s = None if due is None else max(0.0, due - self.clock.now())
            try:
                async with asyncio.timeout(wait_s):
                    await self._new_deadline.wait()
            except TimeoutError:
                continue

    async def close(self) -> None:
        """End every lease and close every endpoint; on return all blocks have been released."""
        self._wake(self.table.expire(math.inf))
        sessions = list(self._sessions)
        for session in sessions:
            session.fence()
        for session in sessions:
            await session.closed.wait()

    # --- for the sessions ---------------------------------------------------------------------

    def admit(self, opening: Open, num_blocks: int, session: ExportSession) -> None:
        """Check what a reader shows, the token first. Raises KVUnknownLease, KVRevoked, KVMismatch."""
        grant = opening.grant
        self._tokens.check(grant, self.clock.now())
        if opening.fingerprint != self._fingerprint:
            raise KVMismatch(f"KV of {self._fingerprint} is here, the reader has {opening.fingerprint}")
        if opening.compression not in (PLAIN, *self.codecs):
            raise KVMismatch(f"KV cannot be sent as {opening.compression} here")
        held = self.table.get(grant.lease, grant.generation)
        if num_blocks != len(held.blocks):
            raise KVMismatch(f"the lease has {len(held.blocks)} blocks, the reader expects {num_blocks}")
        owner = self._owners.get((grant.lease, grant.generation), session)
        if owner is not session and owner.endpoint.alive:
            raise KVRevoked(f"lease {grant.lease} is being read over another endpoint")
        self._owners[grant.lease, grant.generation] = session
        self.table.show(grant.lease, grant.generation)

    def acknowledge(self, lease: LeaseId, generation: int) -> None:
        """Raises KVRevoked."""
        self.table.acknowledge(lease, generation)
        self._wake([lease])

    def joined(self, pull: ExportPull) -> None:
        self._pulls.setdefault(pull.lease, []).append(pull)

    def left(self, pull: ExportPull) -> None:
        pulls = self._pulls[pull.lease]
        pulls.remove(pull)
        if not pulls:
            del self._pulls[pull.lease]

    def num_ready_blocks(self, num_ready: int, num_tokens: int) -> int:
        """Blocks whose every token is written; the last may be partial."""
        if num_ready >= num_tokens:
            return self._layout.blocks_for(num_tokens)
        return num_ready // self._layout.block_size

    def count_sent(self, num_bytes: int) -> None:
        if self._metrics is not None:
            self._metrics.sent(num_bytes, self._transport.name)

    def count_failed(self) -> None:
        if self._metrics is not None:
            self._metrics.failed()

    def _wake(self, leases: Iterable[LeaseId]) -> None:
        for lease in leases:
            for pull in self._pulls.get(lease, ()):
                pull.wake()
