"""The file with which further workers join a cluster of the launcher: `worker.env`, for a shell to source.

    set -a; . .galley/worker.env; set +a
    .venv/bin/python -m services.decode

It holds the addresses and secrets of the cluster and the settings that its decode workers were given, so
that a further worker is like them; also those of its router and gateway, so that one started by hand asks
for the same keys and knows the same topology. Knows nothing of how workers are started.
"""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from common.config import ENV_PREFIX
from deploy.local.spec import ProcessSpec

_OWN = frozenset({"config", "instance", "port", "cores"})
"""What one worker has for itself alone; a settings file is named in a comment, and given with --config."""


def worker_environment(plans: Sequence[ProcessSpec], shared: Mapping[str, str]) -> dict[str, str]:
    """Variables for a further worker. `shared` are those that the whole cluster got, by full name."""
    plan = next(plan for plan in plans if plan.role == "decode")
    variables = {
        f"{ENV_PREFIX}CLUSTER": plan.settings.cluster,
        f"{ENV_PREFIX}NATS_URL": plan.settings.nats_url,
    }
    if secret := plan.settings.secret.get_secret_value():
        variables[f"{ENV_PREFIX}SECRET"] = secret
    for role in ("router", "gateway", "decode"):  # where two have a setting, decode's holds
        variables |= _given(next(plan for plan in plans if plan.role == role))
    return variables | dict(shared)


def _given(plan: ProcessSpec) -> dict[str, str]:
    """What a process was given on its command line, as variables."""
    pairs = (argument.removeprefix("--").partition("=") for argument in plan.argv)
    return {
        ENV_PREFIX + key.replace("-", "_").replace(".", "__").upper(): value
        for key, _, value in pairs
        if key not in _OWN
    }


def write_worker_environment(path: Path, variables: Mapping[str, str], config: Path | None) -> None:
    """Write `variables` so that a shell reads them back; only their owner can."""
    lines = ["# set -a; . this file; set +a; then: python -m services.decode"]
    lines += [f"# and --config {shlex.quote(str(config.resolve()))}"] if config else []
    lines += [f"{name}={shlex.quote(value)}" for name, value in sorted(variables.items())]
    path.unlink(missing_ok=True)
    path.touch(mode=0o600)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
