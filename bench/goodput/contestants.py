"""Who is compared: topologies as clusters of this machine, and servers of others by their addresses.

Pure. Every topology gets the same cores: split ones so many prefill and so many decode workers, the others as
many workers as that together. Knows nothing of how they are started and measured.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import get_args

from common.config import SPLIT, Topology
from common.errors import ConfigError
from deploy.local.spec import ClusterSpec

PRESETS = Path(__file__).resolve().parents[2] / "deploy" / "config"
AGAINST = "against"
"""The name of the servers given by address."""

CHUNKS = (64, 128, 256)
BUDGETS = (512, 2048, 8192)
SEQUENCES = 64
"""Decodes that a chunked step has room for beside its one chunk, in the tightest budget."""


@dataclass(frozen=True, slots=True)
class Contestant:
    """A topology to start, or the `urls` of running servers, that take requests round robin.

    `settings` are what a sweep chose, beside those of `spec`.
    """

    name: str
    spec: ClusterSpec | None = None
    urls: tuple[str, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)

    def using(self, settings: Mapping[str, str]) -> "Contestant":
        """The same with other settings."""
        assert self.spec is not None
        spec = replace(self.spec, settings={**self.spec.settings, **settings})
        return replace(self, spec=spec, settings=dict(settings))

    @property
    def split(self) -> bool:
        return self.spec is not None and self.spec.topology in SPLIT

    @property
    def how(self) -> str:
        """The swept settings in words."""
        return ", ".join(f"{key} {value}" for key, value in self.settings.items()) or "as configured"


@dataclass(frozen=True, slots=True)
class Instances:
    """How many workers a split topology has, and the cores that all of them share out."""

    prefill: int
    decode: int
    cores: tuple[int, ...]

    @property
    def total(self) -> int:
        return self.prefill + self.decode


def topologies(names: Sequence[str], instances: Instances) -> list[Contestant]:
    """The contestants called `names`. Raises ConfigError for an unknown one, naming the choices."""
    known: tuple[Topology, ...] = get_args(Topology)
    found = []
    for name in names:
        if name not in known:
            raise ConfigError(f"there is no topology {name}; there are: {', '.join(known)}", param="compare")
        topology = next(choice for choice in known if choice == name)
        found.append(Contestant(name, cluster_of(topology, instances)))
    if len({contestant.name for contestant in found}) < len(found):
        raise ConfigError("a topology is compared with itself", param="compare")
    return found


def cluster_of(topology: Topology, instances: Instances) -> ClusterSpec:
    """Its preset, if it has one, with the workers and cores of `instances`."""
    preset = PRESETS / f"{topology}.toml"
    split = topology in SPLIT
    return ClusterSpec(
        prefill=instances.prefill if split else 0,
        decode=instances.decode if split else instances.total,
        topology=topology,
        config=preset if preset.is_file() else None,
        cores=",".join(map(str, instances.cores)),
    )


def reference(instances: Instances) -> Contestant:
    """One worker that does both, on the cores that one instance has: where the unloaded times come from."""
    cores = instances.cores[: max(1, len(instances.cores) // instances.total)]
    return Contestant("reference", cluster_of("colocated", Instances(0, 1, cores)))


def candidates(contestant: Contestant, *, quick: bool) -> list[Contestant]:
    """Settings that a sweep tries; none where there is nothing to choose.

    Chunked: every chunk with a step of that chunk and the decodes alone (Sarathi's budget), and with wider
    steps in which several prompts advance. Colocated: prompts up to the budget in one step. `quick` leaves
    some out, see `wider`.
    """
    if contestant.spec is None or contestant.split:
        return []
    if contestant.name == "colocated":
        budgets = BUDGETS[:2] if quick else BUDGETS
        return [contestant.using(_budget(budget)) for budget in budgets]
    tight = [contestant.using(_chunk(chunk, chunk + SEQUENCES)) for chunk in CHUNKS]
    if quick:
        return tight
    return tight + [contestant.using(_chunk(chunk, budget)) for chunk in CHUNKS for budget in BUDGETS[:2]]


def wider(best: Contestant, *, quick: bool) -> list[Contestant]:
    """What a quick sweep tries after the best chunk is known: that chunk with a wide budget."""
    if not quick or best.name != "chunked":
        return []
    return [best.using(_chunk(int(best.settings["chunk_tokens"]), BUDGETS[1]))]


def _chunk(chunk: int, budget: int) -> dict[str, str]:
    return {"chunk_tokens": str(chunk), **_budget(budget)}


def _budget(budget: int) -> dict[str, str]:
    return {"max_num_batched_tokens": str(budget)}
