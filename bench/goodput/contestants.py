"""Who is compared: topologies as clusters of this machine, and servers of others by their addresses.

Pure. Every topology gets the same cores: split ones so many prefill and so many decode workers, the others as
many workers as that together. Knows nothing of how they are started and measured.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from common.errors import ConfigError
from deploy.local.presets import Preset, checked_preset, splits
from deploy.local.spec import ClusterSpec

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
        return self.spec is not None and self.spec.splits

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
    found = [Contestant(name, cluster_of(checked_preset(name), instances)) for name in names]
    if len(set(names)) < len(names):
        raise ConfigError("a topology is compared with itself", param="compare")
    return found


def cluster_of(topology: Preset, instances: Instances) -> ClusterSpec:
    """Its preset, with the workers and cores of `instances`."""
    split = splits(topology)
    return ClusterSpec(
        prefill=instances.prefill if split else 0,
        decode=instances.decode if split else instances.total,
        topology=topology,
        cores=",".join(map(str, instances.cores)),
    )


def reference(instances: Instances, settings: Mapping[str, str]) -> Contestant:
    """One worker that does both, on the cores that one instance has: where the unloaded times come from."""
    cores = instances.cores[: max(1, len(instances.cores) // instances.total)]
    spec = cluster_of("colocated", Instances(0, 1, cores))
    return Contestant("reference", replace(spec, settings=settings))


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
