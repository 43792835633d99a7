"""What a comparison found: trials, and the goodputs and ratios that follow from them, as figures.

Pure. Knows nothing of how it is shown.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import permutations

from bench.goodput.contestants import Contestant
from bench.goodput.effort import Effort
from bench.goodput.estimate import Estimate, Point, Ratio, goodput, ratio, resampled
from bench.goodput.ladder import Ladder
from bench.goodput.slo import TARGETS, Objective, Slo, Unloaded
from bench.goodput.sweep import SweepRow
from bench.goodput.trial import Trial

REFUSALS = (429, 503)
"""A server that says that it is full has missed an SLO; any other error is a fault."""
GIVEN_UP = "given up"
BOUNDS = {"<=": -1.0, ">=": 1.0, "?": 0.0}


@dataclass
class Findings:
    """`modes` has the engine mode of each worker by contestant; `out_of_time` whose search the end of the
    time cut short."""

    workload: str
    about: str
    alone: Unloaded
    slos: tuple[Slo, ...]
    effort: Effort
    ladder: Ladder
    members: Mapping[str, Contestant]
    modes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    sweep: Sequence[SweepRow] = ()
    trials: dict[str, list[Trial]] = field(default_factory=dict)
    out_of_time: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.trials = {name: [] for name in self.members} | self.trials
        self._draws = cache(self._drawn)

    def add(self, trial: Trial) -> None:
        self.trials[trial.contestant].append(trial)
        self._draws.cache_clear()

    @property
    def names(self) -> list[str]:
        return list(self.members)

    @property
    def objectives(self) -> list[Objective]:
        return [Objective(slo, target) for target in TARGETS for slo in self.slos]

    def best_trials(self, name: str) -> list[Trial]:
        """One trial for each rate that was tried, the one with the most requests, by rate."""
        fullest: dict[int, Trial] = {}
        for trial in self.trials[name]:
            if trial.rung not in fullest or len(trial.records) > len(fullest[trial.rung].records):
                fullest[trial.rung] = trial
        return [fullest[rung] for rung in sorted(fullest)]

    def points(self, name: str, objective: Objective) -> list[Point]:
        found = (trial.point(objective) for trial in self.best_trials(name))
        return [point for point in found if point is not None]

    def goodput(self, name: str, objective: Objective) -> Estimate | None:
        """Requests/s over all cores; None where no rate was tried to its end."""
        points = self.points(name, objective)
        return goodput(points, objective.target) if points else None

    def ratio(self, one: str, other: str, objective: Objective) -> Ratio | None:
        left, right = self.goodput(one, objective), self.goodput(other, objective)
        if left is None or right is None:
            return None
        return ratio(left, right, self._draws(one, objective), self._draws(other, objective))

    def common_rung(self) -> int | None:
        """The rung at which most contestants have a complete trial, the highest of those."""
        counts = Counter(
            trial.rung for name in self.names for trial in self.best_trials(name) if trial.complete
        )
        return max(counts, key=lambda rung: (counts[rung], rung), default=None)

    def at(self, name: str, rung: int) -> Trial | None:
        """The complete trial of a contestant at a rung, if there is one."""
        return next((one for one in self.best_trials(name) if one.rung == rung and one.complete), None)

    def figures(self) -> dict[str, float]:
        """`goodput_<workload>_<topology>_k12` and so on; `..._over_...` with `_low` and `_high` of its
        interval; `..._bound` where a figure is one: 1 at least, -1 at most, 0 either way."""
        figures = {
            "unloaded_ttft_ms": 1e3 * self.alone.ttft_s,
            "unloaded_step_ms": 1e3 * self.alone.step_s,
            "late_trials": float(sum(trial.client_was_late for trial in self._all())),
        }
        for objective in self.objectives:
            for name in self.names:
                if (found := self.goodput(name, objective)) is not None:
                    figures |= _bounded(self._key(name, objective), found.value, found.bound)
            for one, other in permutations(self.names, 2):
                if (compared := self.ratio(one, other, objective)) is not None:
                    key = self._key(f"{one}_over_{other}", objective)
                    figures |= _bounded(key, compared.value, compared.bound)
                    figures |= {f"{key}_low": compared.low, f"{key}_high": compared.high}
        return figures

    def problems(self) -> tuple[str, ...]:
        """Faults, one line each: errors other than being full or late, and engines that are not alike."""
        errors: Counter[str] = Counter()
        for trial in self._all():
            for record in trial.records:
                if record.error and record.status not in REFUSALS and not record.error.startswith(GIVEN_UP):
                    errors[f"{trial.contestant}: {record.error}"] += 1
        lines = [f"{text} ({count} times)" for text, count in errors.most_common(5)]
        modes = {mode for found in self.modes.values() for mode in found if mode}
        if len(modes) > 1:
            lines.append(f"the workers run differently: {', '.join(sorted(modes))}")
        return tuple(lines)

    def _all(self) -> list[Trial]:
        return [trial for name in self.names for trial in self.trials[name]]

    def _drawn(self, name: str, objective: Objective) -> list[float]:
        seed = f"{name}/{objective.name}"
        return resampled(self.points(name, objective), objective.target, seed=seed)

    def _key(self, what: str, objective: Objective) -> str:
        return f"goodput_{self.workload}_{what}_{objective.name}".replace("-", "_")


def _bounded(key: str, value: float, bound: str) -> dict[str, float]:
    return {key: value} | ({f"{key}_bound": BOUNDS[bound]} if bound else {})
