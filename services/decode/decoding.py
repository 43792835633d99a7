"""What a decode worker holds for an attempt, and where that stands.

Plain state; who moves it on are service.py, and intake.py for handoffs.
"""

import asyncio
from dataclasses import dataclass, field

from common.engine.sequence import Sequence
from common.ids import BlockId
from common.messages.handoff import KVHandoff
from common.observability.timeline import Stage
from common.runtime.worker import Held


@dataclass(slots=True, eq=False)
class Decoding(Held):
    """| stage    | seq  | pull | leaves by                                                  |
    |----------|------|------|------------------------------------------------------------|
    | loading  | none | none | what the KV pool has of its prefix is here                 |
    | waiting  | none | none | room in the pool                                           |
    | pulling  | none | set  | FINAL and every block; or a transfer error (retryable)     |
    | decoding | set  | done | finish                                                     |

    Without a KV pool `loading` is over at once. A whole job has its `seq` from the start and goes on to
    `decoding` directly. Any stage ends by abort, failure, deadline.
    """

    received: float
    handoff: KVHandoff | None = None
    names: list[bytes] = field(default_factory=list)
    """Of a handoff's full blocks, for whatever sequence it becomes."""
    reserved: list[BlockId] = field(default_factory=list)
    pull: asyncio.Task[None] | None = None
    seq: Sequence | None = None
    started: float | None = None
    """When the engine took up a whole job; None before, and for a handoff."""
    told_stats: bool = False
    num_offered: int = 0
    """How many blocks of a whole job's prompt were offered to the KV pool."""

    @property
    def stage(self) -> Stage:
        if self.seq is None:
            return "waiting_for_kv"
        if self.handoff is None and self.started is None:
            return "queued"
        return "decoding" if self.seq.num_computed >= self.seq.num_prompt else "prefilling"
