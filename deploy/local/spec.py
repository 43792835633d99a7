"""What a local cluster consists of: the processes, and the arguments and environment of each.

Pure: nothing is started here. Every service's settings are resolved as the service itself will resolve
them, so that an impossible value is told before anything runs.
"""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from common.config import (
    SERVICES,
    EngineSettings,
    ServiceSettings,
    parse_cores,
    resolve,
)
from common.config_sources import keys_of, option_of, unknown_key
from common.errors import ConfigError
from common.messages.cluster import Role
from deploy.local.presets import Preset, checked_preset, preset_values, splits

DEFAULT_PORT = 8000
DEFAULT_ROUTER_PORT = 8001


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """What to start. `settings` are service settings by key; each goes to the services that have it.

    What neither they nor `config` nor the environment set, the preset of `topology` does (deploy/config).

    `port` 0 takes a free one. `router_port` None is 8001 beside the default `port`, else a free one.
    Several `gateways` share `port`, which must be given then. `cores` are shared out among the workers; ""
    leaves all to all.
    """

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    router_port: int | None = None
    prefill: int = 1
    decode: int = 1
    gateways: int = 1
    topology: Preset = "disaggregated"
    config: Path | None = None
    cores: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        checked_preset(self.topology)
        counts = (("prefill", self.prefill, 0), ("decode", self.decode, 1), ("gateways", self.gateways, 1))
        for name, count, lowest in counts:
            if not lowest <= count <= 64:
                raise ConfigError(f"{name} = {count}: must be {lowest} to 64 instances", param=name)
        if self.gateways > 1 and not self.port:
            raise ConfigError("several gateways share one port: say which", param="port")
        known = {key for cls in SERVICES.values() for key in keys_of(cls)}
        for key in self.settings:
            if key not in known:
                raise unknown_key(key, key, known)

    @property
    def splits(self) -> bool:
        """Whether there is work for prefill workers; else decode workers do it all."""
        return splits(self.topology)

    @property
    def num_prefill(self) -> int:
        """Prefill workers that are started."""
        return self.prefill if self.splits else 0


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One service process: its name, the module to run, its arguments and its resolved settings."""

    role: Role
    name: str
    module: str
    argv: tuple[str, ...]
    settings: ServiceSettings

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-m", self.module, *self.argv]


def plan_processes(spec: ClusterSpec) -> list[ProcessSpec]:
    """The service processes of `spec`, in the order of a request's way. Raises ConfigError."""
    router_port = spec.router_port
    if router_port is None:
        router_port = DEFAULT_ROUTER_PORT if spec.port == DEFAULT_PORT else 0
    workers: list[tuple[Role, str]] = [("prefill", f"prefill-{i}") for i in range(spec.num_prefill)]
    workers += [("decode", f"decode-{i}") for i in range(spec.decode)]
    shares = share_cores(spec.cores, len(workers))
    return [
        _router(spec, router_port),
        *(
            _worker(spec, role, name, share, len(workers))
            for (role, name), share in zip(workers, shares, strict=True)
        ),
        *(_gateway(spec, number) for number in range(spec.gateways)),
    ]


def share_cores(cores: str, workers: int) -> list[tuple[int, ...]]:
    """Cut the list into one run of cores per worker; with fewer cores than workers, one core each in turn.

    Raises ConfigError when this machine does not give them. Empty tuples when `cores` is empty.
    """
    try:
        wanted = parse_cores(cores)
    except ValueError as error:
        raise ConfigError(f"cores = {cores!r}: {error}", param="cores") from error
    allowed = os.sched_getaffinity(0)
    if not set(wanted) <= allowed:
        have = ",".join(map(str, sorted(allowed)))
        raise ConfigError(f"cores = {cores!r}: this machine gives cores {have}", param="cores")
    if not wanted:
        return [()] * workers
    if len(wanted) < workers:
        return [(wanted[i % len(wanted)],) for i in range(workers)]
    bounds = [i * len(wanted) // workers for i in range(workers + 1)]
    return [wanted[a:b] for a, b in pairwise(bounds)]


def _worker(spec: ClusterSpec, role: Role, name: str, share: tuple[int, ...], workers: int) -> ProcessSpec:
    """One worker: what nobody set is chosen so that all workers of the cluster fit the machine together."""
    plain = _process(spec, role, name, {"port": "0"})
    settings = plain.settings
    assert isinstance(settings, EngineSettings)
    chosen = {"port": "0"}
    unset = EngineSettings.model_fields.keys() - settings.model_fields_set
    if spec.topology == "pooled" and not settings.kv_pool and "kv_pool" not in unset:
        raise ConfigError(
            "topology pooled needs a kv_pool; leave it out for one in /dev/shm", param="kv_pool"
        )
    if share:
        chosen["cores"] = ",".join(map(str, share))
    if "threads" in unset:
        chosen["threads"] = str(len(share) or max(1, len(os.sched_getaffinity(0)) // workers))
    if "memory_fraction" in unset:
        chosen["memory_fraction"] = f"{settings.memory_fraction / workers:.4f}"
    return _process(spec, role, name, chosen)


def _router(spec: ClusterSpec, port: int) -> ProcessSpec:
    topology = preset_values(spec.topology, "router")["topology"]
    return _process(spec, "router", "router-0", {"port": str(port), "topology": topology})


def _gateway(spec: ClusterSpec, number: int) -> ProcessSpec:
    """One of the gateways; the kernel gives each connection to one of those that share the port."""
    chosen = {"port": str(spec.port)} | ({"reuse_port": "true"} if spec.gateways > 1 else {})
    return _process(spec, "gateway", f"gateway-{number}", chosen)


def _process(spec: ClusterSpec, role: Role, name: str, chosen: Mapping[str, str]) -> ProcessSpec:
    cls = SERVICES[role]
    own = keys_of(cls)
    values = {key: value for key, value in spec.settings.items() if key in own}
    values |= {"instance": name, "host": spec.host, **chosen}
    argv = [f"--config={spec.config.resolve()}"] if spec.config else []
    argv += [f"{option_of(key)}={value}" for key, value in values.items()]
    settings = resolve(cls, argv)
    preset = preset_values(spec.topology, role)
    unset = {key: value for key, value in preset.items() if key not in settings.model_fields_set}
    if unset:
        argv += [f"{option_of(key)}={value}" for key, value in unset.items()]
        settings = resolve(cls, argv)
    return ProcessSpec(role, name, f"services.{role}", tuple(argv), settings)
