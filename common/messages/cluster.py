"""How instances make themselves known: who they are, how loaded they are, which prefixes they have cached.

Five beats a second from workers, routers and gateways on `beat`; what silence means is
routing/cluster_view.py's business. What workers cache on `kv-events`; what is made of it is
routing/prefix_index.py's. Plain data.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from common.ids import Incarnation, InstanceRef

Role = Literal["prefill", "decode", "router", "gateway"]

MESSAGE_VERSION = 1
"""Version of everything in this package; raised when an old reader would misread a new message."""


@dataclass(frozen=True, slots=True)
class InstanceInfo:
    """Who an instance is. `versions` is the [lowest, highest] message version it speaks.

    `fingerprint` covers KV layout and weights: only equal ones are paired. `max_model_len` counts prompt +
    output tokens. `step_tokens` is the most tokens that one step computes, `chunk_tokens` the most of one
    prompt, `max_num_seqs` the most sequences; `token_bytes` is the KV of one token. `node`, `rack` and `zone`
    say where it stands, `kv_gbps` what KV did in its test of itself, in 1e9 bytes/s. `names_blocks`, of a
    router, is how many of a prompt's first blocks gateways should name in a RouteRequest. Fields that a role
    does not have are empty.
    """

    ref: InstanceRef
    role: Role
    versions: tuple[int, int]
    http_url: str
    model: str = ""
    fingerprint: str = ""
    max_model_len: int = 0
    block_size: int = 0
    num_blocks: int = 0
    draining: bool = False
    ready: bool = True
    step_tokens: int = 0
    chunk_tokens: int = 0
    max_num_seqs: int = 0
    token_bytes: int = 0
    node: str = ""
    rack: str = ""
    zone: str = ""
    kv_gbps: float = 0.0
    names_blocks: int = 0


@dataclass(frozen=True, slots=True)
class StepCost:
    """What a step takes: base_s + token_s * its tokens + context_s * the sum over tokens of their context.

    Fitted by the worker to its own steps (engine/step_times.py); all 0 before there were some.
    """

    base_s: float = 0.0
    token_s: float = 0.0
    context_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a worker holds right now. Tokens are KV tokens still to compute (queued) or held (running).

    `waiting_tokens` are those of `queued_tokens` that wait for KV from a prefill, or for the KV pool, which
    may turn out to lack some. `residence_s` is how long a sequence that decoded here has lately held its
    blocks, on average; 0 before the first.
    """

    requests_queued: int = 0
    requests_running: int = 0
    requests_waiting_for_kv: int = 0
    queued_tokens: int = 0
    running_tokens: int = 0
    free_blocks: int = 0
    step_ms: float = 0.0
    waiting_tokens: int = 0
    cost: StepCost = StepCost()
    residence_s: float = 0.0


@dataclass(frozen=True, slots=True)
class WorkerBeat:
    """`last_frames` has the number of the last frame per gateway that has not acknowledged it.

    `last_kv_event` is the number of the last KVEvents of this incarnation; 0 before the first.
    """

    KIND: ClassVar[str] = "beat.worker"
    info: InstanceInfo
    load: LoadReport
    last_frames: tuple[tuple[str, int], ...] = ()
    last_kv_event: int = 0


@dataclass(frozen=True, slots=True)
class RouterBeat:
    KIND: ClassVar[str] = "beat.router"
    info: InstanceInfo


@dataclass(frozen=True, slots=True)
class GatewayBeat:
    """`received` acknowledges, per worker incarnation, the last frame up to which none is missing."""

    KIND: ClassVar[str] = "beat.gateway"
    info: InstanceInfo
    received: tuple[tuple[InstanceRef, int], ...] = ()


Beat = WorkerBeat | RouterBeat | GatewayBeat


@dataclass(frozen=True, slots=True)
class KVEvents:
    """How a worker's prefix cache changed since its event `sequence` - 1; they are numbered from 1.

    `evicted` and `stored` name blocks (block_hash.pack); to be applied in this order.
    """

    KIND: ClassVar[str] = "kv.events"
    ref: InstanceRef
    sequence: int
    evicted: str = ""
    stored: str = ""


@dataclass(frozen=True, slots=True)
class KVSnapshotRequest:
    """-> `control.<instance>`: say on `kv-events` what your prefix cache holds; without an answer."""

    KIND: ClassVar[str] = "kv.snapshot.get"
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class KVSnapshot:
    """Part `part` (from 0) of `parts` of what a worker's prefix cache held after event `sequence`.

    `number` tells the snapshots of one incarnation apart, so that parts of two are never put together.
    """

    KIND: ClassVar[str] = "kv.snapshot"
    ref: InstanceRef
    number: int
    sequence: int
    part: int
    parts: int
    stored: str = ""
