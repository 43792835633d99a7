"""Findings whose requests are made up, so that every figure that follows from them is known."""

from collections.abc import Mapping, Sequence

from bench.goodput.contestants import Contestant, Instances, topologies
from bench.goodput.effort import QUICK
from bench.goodput.findings import Findings
from bench.goodput.ladder import Ladder
from bench.goodput.slo import Unloaded
from bench.goodput.trial import Trial
from bench.records import RequestRecord

ALONE = Unloaded(ttft_s=0.1, step_s=0.010)
LADDER = Ladder(base=1.0, step=2.0)
INSTANCES = Instances(1, 1, ())


def records(tpots_ms: Mapping[float, int], errors: Sequence[str] = ()) -> tuple[RequestRecord, ...]:
    """So many requests of each TPOT, and failed ones."""
    good = [
        RequestRecord(
            due=0, sent=0, ended=1, ttft_s=0.2, tpot_s=tpot / 1e3, itl_s=(tpot / 1e3,), output_tokens=64
        )
        for tpot, count in tpots_ms.items()
        for _ in range(count)
    ]
    return (*good, *(RequestRecord(due=0, sent=0, ended=1, error=error) for error in errors))


def trial(name: str, rung: int, tpots_ms: Mapping[float, int], errors: Sequence[str] = ()) -> Trial:
    cores = {"client": 0.01, "gateway": 0.04, "decode": 0.8}
    return Trial(name, rung, LADDER.rate(rung), 100, records(tpots_ms, errors), 50.0, cores)


def members(*names: str) -> dict[str, Contestant]:
    return {one.name: one for one in topologies(names, INSTANCES)}


def findings(*trials: Trial) -> Findings:
    """Colocated and disaggregated, with those trials. TPOT budgets are 20, 15 and 12 ms."""
    found = Findings(
        "long-prompt",
        "512 tokens in, 64 out",
        ALONE,
        ALONE.slos(),
        QUICK,
        LADDER,
        members("colocated", "disaggregated"),
        {"colocated": ("compiled", "compiled"), "disaggregated": ("compiled", "compiled")},
    )
    for one in trials:
        found.add(one)
    return found


def typical() -> Findings:
    """Colocated loses its TPOT as rates rise, disaggregated keeps it up to four requests a second."""
    return findings(
        trial("colocated", 0, {11: 96, 14: 2, 18: 2}),
        trial("colocated", 1, {11: 70, 14: 20, 18: 10}),
        trial("colocated", 2, {11: 10, 14: 20, 18: 40, 30: 30}),
        trial("disaggregated", 1, {11: 100}),
        trial("disaggregated", 2, {11: 95, 14: 5}),
        trial("disaggregated", 3, {11: 50}, ["given up: later than any budget allows"] * 50),
    )
