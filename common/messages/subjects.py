"""The only place where NATS subjects are spelled. Knows nothing of who listens."""

import re
from typing import Literal

from common.errors import ConfigError
from common.ids import InstanceId

_TOKEN = re.compile(r"[A-Za-z0-9_-]{1,64}")


class Subjects:
    """All subjects of one cluster. Raises ConfigError for a name that is not a plain subject token."""

    def __init__(self, cluster: str) -> None:
        self._prefix = f"galley.{_checked('cluster', cluster)}"
        self.route = f"{self._prefix}.route"
        self.route_decode = f"{self._prefix}.route.decode"
        self.beat = f"{self._prefix}.beat"
        self.kv_events = f"{self._prefix}.kv-events"
        self.routers = "routers"
        """Queue group: one router of many answers each route request."""

    def job(self, instance: InstanceId) -> str:
        return self._of("job", instance)

    def handoff(self, instance: InstanceId) -> str:
        return self._of("handoff", instance)

    def abort(self, instance: InstanceId) -> str:
        return self._of("abort", instance)

    def resend(self, instance: InstanceId) -> str:
        return self._of("resend", instance)

    def control(self, instance: InstanceId) -> str:
        return self._of("control", instance)

    def stream(self, gateway: InstanceId) -> str:
        return self._of("stream", gateway)

    def _of(self, what: str, instance: InstanceId) -> str:
        return f"{self._prefix}.{what}.{_checked('instance', instance)}"


def discovery(verb: Literal["PING", "INFO", "STATS"], service: str, identity: str) -> tuple[str, str, str]:
    """Where one service listens by the NATS micro-service convention (ADR-32): asked to all services, to
    those of its name, to it alone."""
    name, own = _checked("service", service), _checked("identity", identity)
    return f"$SRV.{verb}", f"$SRV.{verb}.{name}", f"$SRV.{verb}.{name}.{own}"


def _checked(field: str, name: str) -> str:
    if not _TOKEN.fullmatch(name):
        raise ConfigError(f"{field} {name!r}: use 1 to 64 letters, digits, '-' or '_'", param=field)
    return name
