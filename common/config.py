"""Every setting of every service: its name, default, limits and explanation, and where it may come from.

A value comes from the command line (`--key`), else the environment (`GALLEY_KEY`, `__` for nesting), else
a TOML file (`--config FILE`), else its default. One file or environment may serve a whole cluster: a key of
another service is passed over there, a key of no service is an error. A table `[decode]` in the file
holds for that role alone and wins over the top level. This module alone reads `os.environ`; it knows
nothing of what the settings do.
"""

import json
import os
import secrets
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    model_validator,
)
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict
from typing_extensions import override

from common import config_sources as sources
from common import model_files
from common.errors import ConfigError
from common.messages.cluster import Role

ENV_PREFIX = "GALLEY_"

Topology = Literal["disaggregated", "pooled", "chunked", "colocated"]
SPLIT: frozenset[Topology] = frozenset(("disaggregated", "pooled"))
"""Topologies with workers for prefill alone."""
Port = Annotated[int, Field(ge=0, le=65535)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
PositiveInt = Annotated[int, Field(ge=1)]
Milliseconds = Annotated[float, Field(ge=1, lt=1e8, allow_inf_nan=False)]
Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]


RoutingPolicyName = Literal[
    "round_robin", "least_tokens", "least_predicted_ttft", "prefix_aware", "nearest", "power_of_two"
]
NamePattern = Annotated[str, Field(pattern=r"^[A-Za-z0-9_*?\[\]!-]{1,64}$")]


def _from_json(value: object) -> object:
    """A table that came as text, from the command line: its JSON."""
    return json.loads(value or "{}") if isinstance(value, str) else value


PairTable = Annotated[dict[NamePattern, tuple[NamePattern, ...]], BeforeValidator(_from_json)]


def parse_cores(spec: str) -> tuple[int, ...]:
    """Core numbers of a list as `taskset -c` writes it: "0,2-4" is (0, 2, 3, 4); "" is ().

    Raises ValueError for anything else.
    """
    cores: set[int] = set()
    for part in filter(None, (piece.strip() for piece in spec.split(","))):
        first, dash, last = part.partition("-")
        last = last if dash else first
        if not first.isdecimal() or not last.isdecimal() or int(last) < int(first):
            raise ValueError(f"{part!r} is not a core or a range of cores; write them like 0,2-3")
        cores.update(range(int(first), int(last) + 1))
    return tuple(sorted(cores))


def _checked_cores(spec: str) -> str:
    parse_cores(spec)
    return spec


KV_POOLS = ("file", "mooncake")
"""Schemes of `kv_pool`."""


def _checked_pool(url: str) -> str:
    scheme, colon, _ = url.partition("://")
    if url and (not colon or scheme not in KV_POOLS):
        raise ValueError(f"must be {' or '.join(f'{known}://...' for known in KV_POOLS)}, or empty for none")
    return url


class ServiceSettings(BaseSettings):
    """What every service has. Built by `load`, or directly from keywords in tests."""

    model_config = SettingsConfigDict(
        extra="forbid",
        frozen=True,
        env_prefix=ENV_PREFIX,
        env_nested_delimiter="__",
        env_ignore_empty=True,
    )
    role: ClassVar[Role]

    nats_url: str = Field(
        default="nats://127.0.0.1:4222", min_length=1, description="NATS servers, with commas"
    )
    cluster: Name = Field(
        default="default", description="name of the cluster; instances of one cluster see each other"
    )
    host: str = Field(default="127.0.0.1", min_length=1, description="address to listen on")
    advertise_host: str = Field(default="", description="name by which others reach this host; else `host`")
    port: Port = Field(default=0, description="HTTP port; 0 takes a free one")
    instance: Name = Field(
        default="", validate_default=False, description="name of this instance, unique in the cluster"
    )
    beat_ms: int = Field(default=200, ge=20, le=1000, description="time between two beats, in ms")
    drain_seconds: float = Field(
        default=30, ge=0, le=3600, description="after SIGTERM, time for what is running to end, in s"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="lowest level"
    )
    secret: SecretStr = Field(
        default=SecretStr(""),
        description="secret of the cluster, signs KV transfers; environment or file only",
    )
    announce_fd: int | None = Field(
        default=None, ge=3, description="file descriptor that is told the service's address (for launchers)"
    )

    @model_validator(mode="before")
    @classmethod
    def _name_the_instance(cls, values: dict[str, Any]) -> dict[str, Any]:
        return (
            values if values.get("instance") else {**values, "instance": f"{cls.role}-{secrets.token_hex(3)}"}
        )

    @property
    def nats_servers(self) -> list[str]:
        return [server.strip() for server in self.nats_url.split(",") if server.strip()]

    @property
    def reachable_host(self) -> str:
        """The host part of the addresses that this instance gives to others."""
        wildcard = self.host in ("0.0.0.0", "::")
        return self.advertise_host or (socket.gethostname() if wildcard else self.host)

    @classmethod
    @override
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Keywords only: a settings object built in a test does not depend on the environment."""
        return (init_settings,)


class ModelSettings(ServiceSettings):
    """What has to be known to read the model's files: all but the router need it."""

    model: str = Field(
        default=model_files.DEFAULT_MODEL, min_length=1, description="directory, hub id, or default"
    )
    served_model_name: str = Field(default="", description="name for clients; else the last part of `model`")
    cache_dir: Path = Field(
        default=model_files.DEFAULT_CACHE_DIR,
        description="where converted models, built kernels and compiled graphs are kept",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="arithmetic and KV type; auto takes the checkpoint's"
    )
    max_model_len: PositiveInt | None = Field(
        default=None, description="longest prompt + output, in tokens; else the checkpoint's limit"
    )

    @property
    def model_name(self) -> str:
        """The name that clients use."""
        return self.served_model_name or model_files.served_name(self.model)

    @property
    def cache_path(self) -> Path:
        return self.cache_dir.expanduser()


class UcxSettings(BaseModel):
    """How UCX moves KV. Empty fields are chosen by the self-test at start."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tls: str = Field(default="", description="UCX transports, e.g. sm,tcp; else chosen at start")
    rndv_thresh: str = Field(
        default="", description="size from which UCX takes its rendezvous protocol, e.g. 8192 or inf"
    )
    rndv_scheme: str = Field(default="", description="rendezvous scheme, e.g. get_zcopy")
    progress_mode: Literal["", "blocking", "polling"] = Field(
        default="", description="how UCX makes progress; else blocking"
    )


class EngineSettings(ModelSettings):
    """What prefill and decode workers have in common."""

    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="where the model runs")
    block_size: int = Field(default=16, ge=1, le=256, description="tokens in one KV block")
    num_blocks: PositiveInt | None = Field(
        default=None, description="KV blocks; else as many as memory_fraction allows"
    )
    memory_fraction: float = Field(
        default=0.8, gt=0, le=1, description="share of free memory that the KV pool may take"
    )
    max_num_seqs: PositiveInt = Field(default=64, description="sequences in one step")
    max_num_batched_tokens: PositiveInt = Field(default=2048, description="tokens in one step")
    max_queued_tokens: PositiveInt = Field(
        default=262_144, description="tokens that may wait here; more work is refused as full"
    )
    chunk_tokens: PositiveInt = Field(
        default=256, description="prompt tokens of one sequence in one step, decodes first"
    )
    policy: Literal["prefill_first", "decode_first"] = Field(
        default="prefill_first", description="first in a step: whole prompts, or decodes and then chunks"
    )
    ordering: Literal["fcfs", "shortest_first", "slack", "priority"] = Field(
        default="fcfs", description="who of those that wait goes first, and who is preempted last"
    )
    threads: PositiveInt | None = Field(default=None, description="threads of the model; else one a core")
    compile_model: bool = Field(
        default=True, description="compile the model in the background and then run it so, where that works"
    )
    deterministic: bool = Field(
        default=False, description="the same bits for a request whatever shares its batch; slower to start"
    )
    cores: Annotated[str, AfterValidator(_checked_cores)] = Field(
        default="", description="cores to stay on, as taskset -c writes them: 0,2-3; empty is all"
    )
    kv_timeout_s: Seconds = Field(default=10, description="longest silence of a KV peer, in s")
    kv_compression: Literal["none", "fp8", "int8"] = Field(
        default="none", description="how KV travels; not none is half the bytes, with some loss"
    )
    kv_pool: Annotated[str, AfterValidator(_checked_pool)] = Field(
        default="", description="shared KV pool, file:///DIRECTORY?max_bytes=8GiB or mooncake://HOST:PORT"
    )
    kv_pool_timeout_s: Seconds = Field(
        default=2, description="longest that a call of the KV pool may take; then it is done without, in s"
    )
    kv_pool_min_tokens: PositiveInt = Field(
        default=64, description="fewer tokens are computed rather than loaded from the KV pool"
    )
    node: str = Field(default="", description="name of the machine, for routing; else its host name")
    rack: str = Field(default="", description="name of the machine's rack, for routing")
    zone: str = Field(default="", description="name of its zone or data centre, for routing")
    require_transport: str = Field(
        default="", description="refuse to start unless KV travels over this, e.g. cuda_ipc"
    )
    ucx: UcxSettings = Field(default=UcxSettings(), description="UCX")


class PrefillSettings(EngineSettings):
    role: ClassVar[Role] = "prefill"

    prefill_step_tokens: PositiveInt | None = Field(
        default=None,
        description="prompt tokens in one step; else, measured at start, what keeps the matrix units busy",
    )


class DecodeSettings(EngineSettings):
    role: ClassVar[Role] = "decode"

    policy: Literal["prefill_first", "decode_first"] = Field(
        default="decode_first", description="first in a step: whole prompts, or decodes and then chunks"
    )


class RouterSettings(ServiceSettings):
    role: ClassVar[Role] = "router"

    port: Port = Field(default=8001, description="HTTP port; 0 takes a free one")
    topology: Topology = Field(
        default="disaggregated", description="who prefills: prefill workers, or decode workers"
    )
    routing_policy: RoutingPolicyName = Field(default="prefix_aware", description="how to choose")
    local_prefill_below_tokens: int = Field(
        default=0,
        ge=0,
        description="prompts with fewer tokens, or fewer that are not cached, go straight to a decode worker",
    )
    local_prefill_fallback: bool = Field(
        default=False, description="let decode workers prefill while no prefill worker serves"
    )
    pairs: PairTable = Field(
        default={},
        description='decodes that may serve a prefill, names or patterns: {"prefill-0": ["decode-*"]}',
    )
    slo_admission: bool = Field(
        default=True, description="refuse (429) a request that is predicted to miss the SLO it came with"
    )


class GatewaySettings(ModelSettings):
    role: ClassVar[Role] = "gateway"

    port: Port = Field(default=8000, description="HTTP port; 0 takes a free one")
    request_timeout_s: Seconds = Field(default=600, description="longest life of a request, in s")
    first_token_timeout_s: Seconds = Field(default=60, description="longest wait for the first token, in s")
    default_ttft_slo_ms: Milliseconds | None = Field(
        default=None, description="TTFT budget of requests that name none, in ms; else they have none"
    )
    default_tpot_slo_ms: Milliseconds | None = Field(
        default=None, description="TPOT budget of requests that name none, in ms; else they have none"
    )
    max_attempts: int = Field(default=4, ge=1, le=100, description="how often one choice is started at most")
    max_requests: PositiveInt = Field(default=4096, description="requests in flight; more get 429")
    max_unread_bytes: PositiveInt = Field(
        default=128 * 2**10, description="what a client may leave unread of each choice; more end its request"
    )
    max_body_bytes: PositiveInt = Field(default=4 * 2**20, description="longest HTTP body, in bytes")
    api_keys_file: Path | None = Field(
        default=None, description="file of hashed API keys (galley key makes them); else no key is asked for"
    )
    cors_origins: str = Field(
        default="", description="origins of web pages that may use the API, by commas; * is all, empty none"
    )
    tls_cert: Path | None = Field(default=None, description="PEM file of the certificate chain; else no TLS")
    tls_key: Path | None = Field(default=None, description="PEM file of its key; else in tls_cert")
    reuse_port: bool = Field(
        default=False, description="share the port with other gateways (SO_REUSEPORT); the kernel spreads"
    )

    @property
    def allowed_origins(self) -> frozenset[str]:
        origins = (origin.strip().rstrip("/") for origin in self.cors_origins.split(","))
        return frozenset(origin for origin in origins if origin)


SERVICES: dict[Role, type[ServiceSettings]] = {
    "router": RouterSettings,
    "prefill": PrefillSettings,
    "decode": DecodeSettings,
    "gateway": GatewaySettings,
}


S = TypeVar("S", bound=ServiceSettings)


def load(cls: type[S], argv: Sequence[str]) -> S:
    """The settings of a service started with `argv` (without the program's name).

    `--help` prints every key and ends the process with 0; an unknown key or an impossible value is told in
    one line on stderr and ends it with 2.
    """
    try:
        return resolve(cls, argv)
    except ConfigError as error:
        sys.stderr.write(f"{cls.role}: {error.message}\n")
        raise SystemExit(2) from None


def resolve(cls: type[S], argv: Sequence[str]) -> S:
    """Like `load`, for callers that start services. Raises ConfigError."""
    elsewhere = _all_keys()
    command_line, file = sources.parse_arguments(cls, cls.role, argv)
    environment = {name: value for name, value in os.environ.items() if name.startswith(ENV_PREFIX) and value}
    sources.check_environment(environment, ENV_PREFIX, elsewhere)
    from_environment = EnvSettingsSource(cls)()
    from_file = file_values(cls, file) if file else {}
    values = sources.merge(sources.merge(from_file, from_environment), command_line)
    origins = (("--", command_line), (ENV_PREFIX, from_environment), (f"{file}: ", from_file))
    try:
        return cls(**values)
    except ValidationError as error:
        raise sources.explain(cls, error, origins) from None


def file_values(cls: type[ServiceSettings], file: Path) -> dict[str, Any]:
    """What a settings file says to services of `cls`, by key, unchecked. Raises ConfigError."""
    return sources.read_file(cls, file, cls.role, frozenset(SERVICES), _all_keys())


def _all_keys() -> frozenset[str]:
    return frozenset(key for cls in SERVICES.values() for key in sources.keys_of(cls))


def child_environment(overrides: Mapping[str, str]) -> dict[str, str]:
    """This process's environment with `overrides` (full variable names), for a process to be started."""
    return {**os.environ, **overrides}
