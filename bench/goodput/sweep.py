"""Which settings of a topology are best for a workload: all of them tried at one rate, the best goes on.

The rate lies in the bend of the attainment curve, where settings differ. Knows nothing of what comes after.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from bench.frame import Frame
from bench.goodput.comparison import Comparison
from bench.goodput.contestants import Contestant, candidates, wider
from bench.goodput.fleet import running
from bench.goodput.measure import try_rate, warm_up
from bench.goodput.slo import Slo
from bench.goodput.trial import Jury, Trial

BEND = (0.3, 0.95)
"""A rate tells settings apart where the first one's attainment lies between these."""
BEND_TRIES = 3
BEND_START = 0.7
"""Of what the cores could do at most."""
UP, DOWN = 1.4, 0.7
FEWEST = 12


@dataclass(frozen=True, slots=True)
class SweepRow:
    """One setting of a topology at the sweep's rate."""

    contestant: Contestant
    trial: Trial

    def attainment(self, slos: Sequence[Slo]) -> float:
        """The mean over the SLOs: one setting goes on for all of them."""
        return sum(self.trial.attainment(slo) for slo in slos) / len(slos)

    def score(self, slos: Sequence[Slo]) -> tuple[float, float]:
        """Attainment; between equals the median TTFT or TPOT against the tightest SLO, whichever is worse."""
        tightest = min(slos, key=lambda slo: slo.tpot_s)
        ttft, tpot = self.trial.percentile("ttft_s", 50), self.trial.percentile("tpot_s", 50)
        slowness = max((ttft or 1e9) / tightest.ttft_s, (tpot or 0.0) / tightest.tpot_s)
        return self.attainment(slos), -slowness


class Sweep:
    """The sweep of one topology. `rows` has what was tried."""

    def __init__(self, comparison: Comparison, slos: Sequence[Slo], rate: float, frame: Frame) -> None:
        """`rate` is what the topology's cores could do at most, in requests/s."""
        self._comparison = comparison
        self._slos = slos
        self._rate = BEND_START * rate
        self._frame = frame
        self.rows: list[SweepRow] = []

    async def best(self, contestant: Contestant) -> Contestant:
        """The contestant with its best settings; itself where there is nothing to choose."""
        quick = self._comparison.effort.quick
        if not self._comparison.effort.sweep:
            return contestant
        for candidate in candidates(contestant, quick=quick):
            await self._try(candidate)
        if not self.rows:
            return contestant
        for candidate in wider(self._leader(), quick=quick):
            await self._try(candidate)
        self._frame.note(f"{contestant.name} goes on with {self._leader().how}")
        return self._leader()

    def _leader(self) -> Contestant:
        return max(self.rows, key=lambda row: row.score(self._slos)).contestant

    async def _try(self, candidate: Contestant) -> None:
        """Add one row; the first one looks for the rate of all."""
        comparison, effort = self._comparison, self._comparison.effort
        async with running(candidate, self._frame.console, plan=comparison.plan) as member:
            await warm_up(member, comparison.workload)
            for last in (True,) if self.rows else (False,) * (BEND_TRIES - 1) + (True,):
                asked = min(effort.sweep_requests, max(FEWEST, round(self._rate * effort.sweep_s)))
                order = comparison.order(0, self._rate, asked, self._slos)
                row = SweepRow(candidate, await try_rate(member, order, Jury([], asked), self._frame))
                share = row.attainment(self._slos)
                if last or BEND[0] <= share <= BEND[1]:
                    break
                self._rate *= UP if share > BEND[1] else DOWN
        self.rows.append(row)
        self._frame.note(f"sweep: {candidate.name}, {candidate.how}: {share:.0%} at {row.trial.rate:.3g}/s")
