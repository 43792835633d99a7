"""Topologies as `make up` knows them: a file of settings for each, deploy/config/NAME.toml.

A preset fills in what nobody has set. Knows nothing of processes.
"""

from pathlib import Path
from typing import Literal, get_args

from common.config import SERVICES, SPLIT, file_values
from common.errors import ConfigError
from common.messages.cluster import Role

Preset = Literal["disaggregated", "pooled", "chunked", "colocated", "hybrid"]

DIRECTORY = Path(__file__).resolve().parents[1] / "config"


def checked_preset(name: str) -> Preset:
    """Raises ConfigError for a name that is none, with those that are."""
    for preset in get_args(Preset):
        if name == preset:
            return name  # type: ignore[return-value]
    raise ConfigError(f"topology = {name!r}: must be one of {', '.join(get_args(Preset))}", param="topology")


def preset_values(preset: Preset, role: Role) -> dict[str, str]:
    """What the preset says to services of `role`, as on a command line. Raises ConfigError."""
    values = file_values(SERVICES[role], DIRECTORY / f"{preset}.toml")
    return {
        key: str(value).lower() if isinstance(value, bool) else str(value) for key, value in values.items()
    }


def splits(preset: Preset) -> bool:
    """Whether it has workers for prefill alone."""
    return preset_values(preset, "router")["topology"] in SPLIT
