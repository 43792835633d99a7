"""Which worker has which blocks in its prefix cache: built from their events, repaired by their snapshots.

Pure. Knows nothing of subjects, and not of what a hit is worth (policies/).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from common.ids import InstanceId, InstanceRef
from common.messages.block_hash import unpack
from common.messages.cluster import KVEvents, KVSnapshot

MAX_EARLY = 32
"""Events kept of one worker while an earlier one is missing; a snapshot makes up for the rest."""


@dataclass(slots=True)
class _Collected:
    """The parts of one snapshot that have arrived."""

    number: int
    parts: dict[int, list[bytes]] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Worker:
    """`blocks` is what the cache of `ref` held after event `applied`; `latest` the last one there was."""

    ref: InstanceRef
    capacity: int
    applied: int = 0
    latest: int = 0
    blocks: set[bytes] = field(default_factory=set)
    early: dict[int, KVEvents] = field(default_factory=dict)
    collected: _Collected | None = None

    @property
    def behind(self) -> bool:
        return self.applied < self.latest


class PrefixIndex:
    """One entry per living worker name, of the incarnation that beats:

    | state   | event | next |
    |---------|-------|------|
    | unknown | `observe` its beat | in step if it has told nothing yet, else behind |
    | in step | its next event | in step |
    | in step | a later event, or a beat that tells of one | behind; the event is kept |
    | behind  | the events in between, or a whole snapshot | in step when that and the kept events suffice |
    | any     | `observe` another incarnation of its name | unknown, then as above |
    | any     | `drop` | unknown |

    While behind, what was known before is still believed: it is a hint, and the worker has the last word.
    Bounded: of a worker no more blocks than its pool has, which no honest one tells of.
    """

    def __init__(self) -> None:
        self._workers: dict[InstanceId, _Worker] = {}

    # --- what happens -----------------------------------------------------------------------------

    def observe(self, ref: InstanceRef, num_blocks: int, last_event: int) -> bool:
        """A beat: `ref` has a pool of `num_blocks` and has told `last_event` events.

        Whether a snapshot should be asked for.
        """
        worker = self._workers.get(ref.instance)
        if worker is None or worker.ref != ref:
            worker = self._workers[ref.instance] = _Worker(ref, num_blocks)
        worker.latest = max(worker.latest, last_event)
        return worker.behind

    def apply(self, event: KVEvents) -> None:
        """Take in one event, or keep it for when those before it are here.

        Raises MessageInvalid for names that are none; the event then counts as lost.
        """
        worker = self._find(event.ref)
        if worker is None or event.sequence <= worker.applied:
            return
        worker.latest = max(worker.latest, event.sequence)
        if event.sequence == worker.applied + 1 or len(worker.early) < MAX_EARLY:
            worker.early[event.sequence] = event
        self._catch_up(worker)

    def install(self, part: KVSnapshot) -> None:
        """Take in one part of a snapshot. Raises MessageInvalid for names that are none."""
        worker = self._find(part.ref)
        if worker is None or not worker.behind or part.sequence <= worker.applied:
            return
        if worker.collected is None or worker.collected.number != part.number:
            worker.collected = _Collected(part.number)
        parts = worker.collected.parts
        parts[part.part] = unpack(part.stored)
        if sum(map(len, parts.values())) > worker.capacity:
            parts.clear()
        if len(parts) < part.parts:
            return
        worker.collected = None
        worker.blocks = {block for blocks in parts.values() for block in blocks}
        worker.applied = part.sequence
        worker.latest = max(worker.latest, part.sequence)
        self._catch_up(worker)

    def drop(self, ref: InstanceRef) -> None:
        """It is dead: nothing is cached there."""
        if self._find(ref) is not None:
            del self._workers[ref.instance]

    # --- what is known ----------------------------------------------------------------------------

    def match(self, hashes: Sequence[bytes]) -> dict[InstanceRef, int]:
        """How many of a prompt's first blocks each worker has; those with none are left out."""
        found = {}
        for worker in self._workers.values():
            blocks, count = worker.blocks, 0
            for content in hashes:
                if content not in blocks:
                    break
                count += 1
            if count:
                found[worker.ref] = count
        return found

    def num_blocks(self, ref: InstanceRef) -> int:
        """Blocks known to be cached there."""
        worker = self._find(ref)
        return 0 if worker is None else len(worker.blocks)

    @property
    def total_blocks(self) -> int:
        """The sum over all workers."""
        return sum(len(worker.blocks) for worker in self._workers.values())

    def _find(self, ref: InstanceRef) -> _Worker | None:
        worker = self._workers.get(ref.instance)
        return worker if worker is not None and worker.ref == ref else None

    def _catch_up(self, worker: _Worker) -> None:
        """Apply what is kept and follows without a gap; forget what a snapshot has overtaken."""
        for sequence in sorted(worker.early):
            if sequence > worker.applied + 1:
                break
            event = worker.early.pop(sequence)
            if sequence == worker.applied + 1:
                evicted, stored = unpack(event.evicted), unpack(event.stored)
                worker.blocks.difference_update(evicted)
                worker.blocks.update(stored)
                worker.applied = sequence
        if len(worker.blocks) > worker.capacity:
            worker.blocks.clear()
