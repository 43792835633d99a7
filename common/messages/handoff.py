"""How a prefill hands a request to a decode: the handoff message and what FINAL carries.

Plain data; the bytes on the KV wire are kv/wire.py's business. See docs/protocol.md.
"""

from dataclasses import dataclass
from typing import ClassVar

from common.ids import AttemptKey, InstanceId, InstanceRef, LeaseId
from common.messages.generation import SLO, SamplingParams


@dataclass(frozen=True, slots=True)
class KVSource:
    """One rank that holds a slice of the KV: where to connect, and which kv heads and layers it has.

    Ranges are [start, stop). `address` is opaque to everybody but the KV transport.
    """

    address: str
    heads: tuple[int, int]
    layers: tuple[int, int]


@dataclass(frozen=True, slots=True)
class LeaseGrant:
    """The right of one reader incarnation to pull one lease generation; `token` proves it on the wire."""

    lease: LeaseId
    generation: int
    reader: InstanceRef
    token: str


@dataclass(frozen=True, slots=True)
class KVHandoff:
    """Prefill -> `handoff.<instance>`: pull this KV and decode on. Idempotent by (key, grant.generation).

    The KV covers prompt_ids + output_ids: num_tokens tokens in blocks of the layout's block size. The
    token that prefill samples next is not in output_ids; it comes with FINAL. `fingerprint` covers
    layout and weights. `age_s` and `time_left_s` as in Job. `compressions` are what the exporter can also
    send the KV as, `compression` the one it would rather (kv/codec.py); an exporter that knows of none says
    nothing of either.
    """

    KIND: ClassVar[str] = "handoff"
    key: AttemptKey
    gateway: InstanceId
    prefill: InstanceRef
    grant: LeaseGrant
    sources: tuple[KVSource, ...]
    fingerprint: str
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    sampling: SamplingParams
    time_left_s: float
    age_s: float
    priority: int = 0
    cache_salt: str = ""
    slo: SLO | None = None
    compression: str = "none"
    compressions: tuple[str, ...] = ()

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)
