"""How instances make themselves known: beats with who they are and how loaded they are.

Five beats a second from workers, routers and gateways on `beat`. Plain data; what silence means is
routing/cluster_view.py's business.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from common.ids import InstanceRef

Role = Literal["prefill", "decode", "router", "gateway"]

MESSAGE_VERSION = 1
"""Version of everything in this package; raised when an old reader would misread a new message."""


@dataclass(frozen=True, slots=True)
class InstanceInfo:
    """Who an instance is. `versions` is the [lowest, highest] message version it speaks.

    `fingerprint` covers KV layout and weights: only equal ones are paired. `max_model_len` counts prompt +
    output tokens. Fields that a role does not have are empty.
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


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a worker holds right now. Tokens are KV tokens still to compute (queued) or held (running)."""

    requests_queued: int = 0
    requests_running: int = 0
    requests_waiting_for_kv: int = 0
    queued_tokens: int = 0
    running_tokens: int = 0
    free_blocks: int = 0
    step_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class WorkerBeat:
    """`last_frames` has the number of the last frame per gateway that has not acknowledged it."""

    KIND: ClassVar[str] = "beat.worker"
    info: InstanceInfo
    load: LoadReport
    last_frames: tuple[tuple[str, int], ...] = ()


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
