"""Who may read which blocks for how long: leases as a pure table.

A lease holds one request's blocks for one reader until it is acknowledged, aborted, past its deadline or
its reader is dead; waiting in a queue never ends it. Its blocks go back exactly once, when it has ended
and no read is in flight. Knows nothing of endpoints, bytes and tokens; time comes from the caller.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from common.clock import Clock
from common.errors import KVRevoked, KVUnknownLease
from common.ids import AttemptKey, BlockId, IdSource, InstanceRef, LeaseId
from common.kv.wire import FinalResult

LeaseState = Literal["waiting", "reading", "ending"]
LEASE_STATES: tuple[LeaseState, ...] = ("waiting", "reading", "ending")


@dataclass(slots=True)
class KVLease:
    """One lease. `num_ready` of `num_tokens` tokens are computed; times are on the table's clock.

    `reads` counts reads in flight, of whatever generation. `shown` is the generation whose reader has
    come, 0 for none yet. `final_given` is set once a reader has seen FINAL.
    """

    lease: LeaseId
    key: AttemptKey
    blocks: tuple[BlockId, ...]
    num_tokens: int
    deadline: float
    num_ready: int
    generation: int = 0
    reader: InstanceRef | None = None
    shown: int = 0
    reads: int = 0
    final: FinalResult | None = None
    final_since: float = 0.0
    final_given: bool = False
    ended: bool = False

    @property
    def state(self) -> LeaseState:
        if self.ended:
            return "ending"
        return "reading" if self.generation and self.shown == self.generation else "waiting"


class LeaseTable:
    """All leases of one exporter.

    | state | event | next |
    |---|---|---|
    | - | open | waiting |
    | waiting, reading | bind, FINAL not given | waiting, generation + 1; older ones are revoked |
    | waiting | show (the reader came) | reading |
    | reading | begin_read, end_read | reading, reads +1, -1 |
    | reading | give_final | reading, bind forbidden from now on |
    | reading | acknowledge | ending |
    | waiting, reading | abort, expire, reader_dead | ending |
    | ending | (reads = 0) | gone: blocks released |
    | ending | end_read | ending |
    """

    def __init__(
        self,
        clock: Clock,
        ids: IdSource,
        release: Callable[[Sequence[BlockId]], None],
        gone: Callable[[AttemptKey], None] | None = None,
    ) -> None:
        """`release` gets a lease's blocks back, then `gone` hears whose they were; both once."""
        self._clock = clock
        self._ids = ids
        self._release = release
        self._gone = gone
        self._leases: dict[LeaseId, KVLease] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def open(
        self, key: AttemptKey, blocks: Sequence[BlockId], num_tokens: int, deadline: float, num_ready: int
    ) -> LeaseId:
        """Take over `blocks`, which the caller has retained for this lease."""
        lease = LeaseId(self._ids.hex())
        self._leases[lease] = KVLease(lease, key, tuple(blocks), num_tokens, deadline, num_ready)
        return lease

    def bind(self, lease: LeaseId, reader: InstanceRef) -> int:
        """Name the reader and revoke earlier ones; returns the new generation.

        Raises KVUnknownLease, and KVRevoked once FINAL was given: that reader may already be decoding.
        """
        held = self._live(lease)
        if held.final_given:
            raise KVRevoked(f"lease {lease} has given FINAL to {held.reader}; it cannot be bound again")
        held.reader = reader
        held.generation += 1
        return held.generation

    def get(self, lease: LeaseId, generation: int) -> KVLease:
        """The lease as that generation's reader may see it. Raises KVUnknownLease, KVRevoked."""
        held = self._leases.get(lease)
        if held is None:
            raise KVUnknownLease(f"lease {lease} is not (any more) held here")
        if held.ended or generation != held.generation:
            raise KVRevoked(f"generation {generation} of lease {lease} was taken back")
        return held

    def show(self, lease: LeaseId, generation: int) -> None:
        """The reader of this generation has come. Raises like `get`."""
        self.get(lease, generation).shown = generation

    def advance(self, lease: LeaseId, num_ready: int) -> None:
        """Tokens [0, num_ready) are computed. Does nothing for a lease that has ended."""
        held = self._leases.get(lease)
        if held is not None:
            held.num_ready = max(held.num_ready, min(num_ready, held.num_tokens))

    def set_final(self, lease: LeaseId, final: FinalResult) -> None:
        """The prefill is complete. Does nothing for a lease that has ended."""
        held = self._leases.get(lease)
        if held is not None:
            held.num_ready = held.num_tokens
            held.final = final
            held.final_since = self._clock.now()

    def give_final(self, lease: LeaseId, generation: int) -> FinalResult | None:
        """FINAL for its reader, as often as it asks; None while the prefill still runs. Raises like `get`."""
        held = self.get(lease, generation)
        if held.final is None:
            return None
        held.final_given = True
        return replace(held.final, age_s=self._clock.now() - held.final_since)

    def begin_read(self, lease: LeaseId, generation: int) -> None:
        """From here to `end_read` the blocks stay, whatever ends the lease. Raises like `get`."""
        self.get(lease, generation).reads += 1

    def end_read(self, lease: LeaseId) -> None:
        held = self._leases[lease]
        held.reads -= 1
        self._settle(held)

    def acknowledge(self, lease: LeaseId, generation: int) -> None:
        """The reader has everything. Raises KVRevoked; a lease that is gone is as good as acknowledged."""
        if lease in self._leases:
            self._end(self.get(lease, generation))

    def abort(self, key: AttemptKey) -> list[LeaseId]:
        """End the leases of `key`; returns them."""
        return self._end_all([held for held in self._leases.values() if held.key == key])

    def reader_dead(self, reader: InstanceRef) -> list[LeaseId]:
        """End the leases bound to that incarnation; returns them."""
        return self._end_all([held for held in self._leases.values() if held.reader == reader])

    def expire(self, now: float) -> list[LeaseId]:
        """End the leases whose deadline has passed; returns them."""
        return self._end_all([held for held in self._leases.values() if held.deadline <= now])

    def next_deadline(self) -> float | None:
        """When `expire` will next have something to do."""
        return min((held.deadline for held in self._leases.values() if not held.ended), default=None)

    def count(self) -> dict[LeaseState, int]:
        """Leases by state, for the gauge."""
        counts = dict.fromkeys(LEASE_STATES, 0)
        for held in self._leases.values():
            counts[held.state] += 1
        return counts

    def _live(self, lease: LeaseId) -> KVLease:
        held = self._leases.get(lease)
        if held is None or held.ended:
            raise KVUnknownLease(f"lease {lease} has ended")
        return held

    def _end_all(self, ending: list[KVLease]) -> list[LeaseId]:
        live = [held for held in ending if not held.ended]
        for held in live:
            self._end(held)
        return [held.lease for held in live]

    def _end(self, held: KVLease) -> None:
        held.ended = True
        self._settle(held)

    def _settle(self, held: KVLease) -> None:
        if held.ended and held.reads == 0:
            del self._leases[held.lease]
            self._release(held.blocks)
            if self._gone is not None:
                self._gone(held.key)
