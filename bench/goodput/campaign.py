"""The whole comparison: unloaded times, sweeps, then the search of all contestants in turn.

In every round each contestant tries one rate, another one begins each round: whatever else the machine does
comes and goes for all. Knows nothing of the command line and of how findings are shown.
"""

import time
from collections.abc import Sequence
from dataclasses import replace

from bench.frame import Frame
from bench.goodput.comparison import Comparison
from bench.goodput.contestants import reference
from bench.goodput.effort import TimeLimit
from bench.goodput.findings import Findings
from bench.goodput.fleet import Fleet, fleet_of, running
from bench.goodput.ladder import Ladder, LadderSearch
from bench.goodput.measure import try_rate, unloaded, warm_up
from bench.goodput.slo import Objective, Slo, Unloaded
from bench.goodput.sweep import Sweep, SweepRow
from bench.goodput.trial import Jury, Trial

LOWEST_SHARE = 0.05
"""Of what a contestant's cores could do at most: who keeps no SLO even there is not worth more time."""


async def compare(comparison: Comparison, frame: Frame) -> Findings:
    """Carry it out. Raises ClusterFailed, ServerRefused and RequestsFailed."""
    limit = TimeLimit(time.monotonic(), comparison.effort.minutes)
    alone = await _unloaded(comparison, frame)
    slos = comparison.fixed or alone.slos()
    for slo in slos:
        frame.note(f"SLO {slo.name}: TTFT {1e3 * slo.ttft_s:.0f} ms, TPOT {1e3 * slo.tpot_s:.2f} ms")
    output = comparison.workload.means()[1]
    chosen, rows = [], list[SweepRow]()
    for contestant in comparison.contestants:
        sweep = Sweep(comparison, slos, comparison.capacity(contestant, alone, output), frame)
        chosen.append(await sweep.best(contestant))
        rows += sweep.rows
    async with fleet_of(chosen, frame.console, plan=comparison.plan) as fleet:
        findings = Findings(
            comparison.workload.name,
            comparison.workload.about,
            alone,
            slos,
            comparison.effort,
            _ladder(comparison, alone),
            members={name: member.contestant for name, member in fleet.members.items()},
            modes={name: tuple(member.modes.values()) for name, member in fleet.members.items()},
            sweep=rows,
        )
        await Campaign(comparison, fleet, findings, limit, frame).run()
    return findings


def _ladder(comparison: Comparison, alone: Unloaded) -> Ladder:
    """Rung 0 is what one worker could prefill; the lowest one a small share of what all could do at most."""
    output = comparison.workload.means()[1]
    least = min(comparison.capacity(contestant, alone, output) for contestant in comparison.contestants)
    ladder = Ladder(1 / alone.ttft_s, comparison.effort.step, comparison.effort.stride)
    return replace(ladder, lowest=ladder.rung_below(LOWEST_SHARE * least))


async def _unloaded(comparison: Comparison, frame: Frame) -> Unloaded:
    """From one worker that does both; from the servers of others where there is nothing of ours."""
    ours = [contestant.spec for contestant in comparison.contestants if contestant.spec is not None]
    who = reference(comparison.instances, ours[0].settings) if ours else comparison.contestants[0]
    async with running(who, frame.console, plan=comparison.plan) as member:
        await warm_up(member, comparison.workload)
        found = await unloaded(member, comparison.workload, frame)
    frame.note(f"unloaded: TTFT {1e3 * found.ttft_s:.0f} ms, step of eight {1e3 * found.step_s:.2f} ms")
    return found


class Campaign:
    """The search of a fleet that is up. `run` it once; what it finds is added to `findings`."""

    def __init__(
        self, comparison: Comparison, fleet: Fleet, findings: Findings, limit: TimeLimit, frame: Frame
    ) -> None:
        self._comparison = comparison
        self._fleet = fleet
        self._findings = findings
        self._limit = limit
        self._frame = frame
        self._output = comparison.workload.means()[1]
        self._searches = {name: self._search(name) for name in findings.names}

    async def run(self) -> None:
        for name in self._findings.names:
            async with self._fleet.awake(name) as member:
                await warm_up(member, self._comparison.workload)
        names, number = self._findings.names, 0
        while names:
            begin = number % len(names)
            for name in names[begin:] + names[:begin]:
                if not await self._step(name, len(names)):
                    names.remove(name)
            number += 1
        await self._meet()

    def _search(self, name: str) -> LadderSearch:
        findings, ladder = self._findings, self._findings.ladder
        most = self._comparison.capacity(findings.members[name], findings.alone, self._output)
        return LadderSearch(
            ladder, self._comparison.effort.objectives(findings.slos), ladder.rung_below(most)
        )

    async def _step(self, name: str, contenders: int) -> bool:
        """One trial of one contestant; False when there is none left, or no time for it."""
        search = self._searches[name]
        rung = search.next_rung()
        if rung is None:
            return False
        trial = await self._try(name, rung, search.open_at(rung), contenders)
        if trial is None:
            self._findings.out_of_time.append(name)
            return False
        search.record(rung, {objective: trial.verdict(objective) for objective in search.brackets})
        return True

    async def _meet(self) -> None:
        """Have every contestant try the rate at which most have been: SLO scales are compared there."""
        rung = self._findings.common_rung()
        for name in self._findings.names:
            if rung is not None and self._findings.at(name, rung) is None:
                await self._try(name, rung, [], 1)

    async def _try(
        self, name: str, rung: int, open_ones: Sequence[Objective], contenders: int
    ) -> Trial | None:
        """Try a rung and keep the trial; None when there is no time for it."""
        effort, slos = self._comparison.effort, self._findings.slos
        rate = self._findings.ladder.rate(rung)
        order = self._comparison.order(rung, rate, effort.requests, slos)
        seconds = order.asked / rate + order.loosest.hopeless_after(round(self._output)) / 2
        if not self._limit.allows(seconds, time.monotonic(), contenders):
            return None
        jury = Jury(open_ones, order.asked, effort.patience)
        async with self._fleet.awake(name) as member:
            trial = await try_rate(member, order, jury, self._frame)
        self._findings.add(trial)
        self._frame.note(_line(trial, slos))
        return trial


def _line(trial: Trial, slos: Sequence[Slo]) -> str:
    """A trial, for somebody who watches."""
    shares = "  ".join(f"{slo.name} {trial.attainment(slo):4.0%}" for slo in slos)
    ttft, tpot = trial.percentile("ttft_s", 50), trial.percentile("tpot_s", 50)
    times = f"TTFT {1e3 * (ttft or 0):.0f} ms, TPOT {1e3 * (tpot or 0):.1f} ms"
    end = "" if trial.complete else f", given up after {len(trial.records)} of {trial.asked}"
    late = ", THE CLIENT WAS LATE" if trial.client_was_late else ""
    return f"{trial.contestant:14s} {trial.rate:6.3f}/s  {shares}  {times}{end}{late}"
