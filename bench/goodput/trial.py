"""One rate tried on one contestant: what became of its requests, and when it is not worth going on.

Pure. Knows nothing of how requests are sent.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from bench.goodput.estimate import Point
from bench.goodput.slo import Objective, Slo
from bench.records import RequestRecord
from bench.stats import percentile

LATE_S = 0.020
"""A request sent later than this after its time tells of a client that cannot keep up."""
LATE_SHARE = 0.02
"""So many of them make it a problem."""


@dataclass(frozen=True, slots=True)
class Trial:
    """`records` are of the requests that were sent, in order; `asked` were planned at `rate` requests/s.

    `cores` is who used how much of a core meanwhile, `seconds` how long it took from first to last byte.
    """

    contestant: str
    rung: int
    rate: float
    asked: int
    records: tuple[RequestRecord, ...]
    seconds: float
    cores: Mapping[str, float] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        return len(self.records) == self.asked

    def met(self, slo: Slo) -> int:
        return sum(slo.met_by(record) for record in self.records)

    def attainment(self, slo: Slo) -> float:
        """Of those that were sent."""
        return self.met(slo) / len(self.records)

    def verdict(self, objective: Objective) -> bool | None:
        """Whether the target was met; None where the trial was given up before this was decided."""
        missed = len(self.records) - self.met(objective.slo)
        if not objective.allows(missed, self.asked):
            return False
        return True if self.complete else None

    def point(self, objective: Objective) -> Point | None:
        """What the trial says of the objective's goodput; None where nothing."""
        verdict = self.verdict(objective)
        if verdict is None:
            return None
        return Point(self.rate, self.met(objective.slo), len(self.records), missed_for_sure=not verdict)

    def percentile(self, quantity: str, q: float) -> float | None:
        """Of `ttft_s`, `tpot_s` or all gaps (`itl_s`), in s, over requests that ended well."""
        good = [record for record in self.records if record.ok]
        if quantity == "itl_s":
            samples = [gap for record in good for gap in record.itl_s]
        else:
            samples = [value for record in good if (value := getattr(record, quantity)) is not None]
        return percentile(samples, q) if samples else None

    @property
    def lateness_s(self) -> float:
        """p99 of how much later than its time a request was sent."""
        return percentile([record.sent - record.due for record in self.records], 99)

    @property
    def client_was_late(self) -> bool:
        late = sum(record.sent - record.due > LATE_S for record in self.records)
        return late > LATE_SHARE * len(self.records)

    @property
    def errors(self) -> Mapping[str, int]:
        """What went wrong, how often."""
        return Counter(record.error for record in self.records if record.error)


class Jury:
    """Follows a trial and says when no open objective can be met any more.

    `patience` is how many times as many as are allowed may miss before that: what is measured beyond makes
    the estimate between two rates better.
    """

    def __init__(self, objectives: Sequence[Objective], asked: int, patience: float = 1.0) -> None:
        self._objectives = objectives
        self._asked = asked * patience
        self._missed = dict.fromkeys(objectives, 0)

    def ended(self, record: RequestRecord) -> None:
        for objective in self._objectives:
            self._missed[objective] += not objective.slo.met_by(record)

    def hopeless(self, running: Iterable[tuple[float, int]]) -> bool:
        """`running` are (age in s, output tokens) of requests under way."""
        under_way = list(running)
        return bool(self._objectives) and not any(
            objective.allows(self._missed[objective] + _overdue(objective.slo, under_way), self._asked)
            for objective in self._objectives
        )


def _overdue(slo: Slo, running: Iterable[tuple[float, int]]) -> int:
    return sum(age > slo.hopeless_after(output_tokens) for age, output_tokens in running)
