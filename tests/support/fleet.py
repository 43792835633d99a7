"""Made-up instances and beats for tests of routing and membership."""

from dataclasses import replace

from common.ids import Incarnation, InstanceId, InstanceRef
from common.messages.cluster import MESSAGE_VERSION, GatewayBeat, InstanceInfo, LoadReport, Role, WorkerBeat


def ref(name: str, incarnation: str = "i1") -> InstanceRef:
    return InstanceRef(InstanceId(name), Incarnation(incarnation))


def info(name: str, role: Role, incarnation: str = "i1", **changes: object) -> InstanceInfo:
    """A ready instance of our version; `changes` are InstanceInfo's fields."""
    plain = InstanceInfo(
        ref=ref(name, incarnation),
        role=role,
        versions=(MESSAGE_VERSION, MESSAGE_VERSION),
        http_url=f"http://{name}",
        fingerprint="same",
        max_model_len=1000,
        block_size=16,
        num_blocks=1000,
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


def worker_beat(
    name: str,
    role: Role = "decode",
    incarnation: str = "i1",
    *,
    load: LoadReport | None = None,
    **changes: object,
) -> WorkerBeat:
    return WorkerBeat(info(name, role, incarnation, **changes), load or LoadReport())


def gateway_beat(name: str = "g1", incarnation: str = "i1") -> GatewayBeat:
    return GatewayBeat(info(name, "gateway", incarnation))
