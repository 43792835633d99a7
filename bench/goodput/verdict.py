"""What the figures say in plain words: who wins, by how much, and at which k splitting stops paying.

Pure. Knows nothing of plots and files.
"""

from collections.abc import Iterator

from bench.goodput.estimate import Estimate, Ratio
from bench.goodput.findings import Findings
from bench.goodput.slo import TARGETS, Objective, Slo

LEVEL = 0.05
"""Ratios that differ less from 1 are called level, however narrow their interval."""
UNDECIDED = "not decided by the rates measured"
FACTORS = tuple(round(1.1 + 0.05 * number, 2) for number in range(39))
"""The k at which ratios are read off: 1.1 to 3."""


def sentences(findings: Findings) -> list[str]:
    """One line for each split topology against each of the others, and each SLO."""
    lines = []
    for one, other in _pairs(findings):
        for slo in findings.slos:
            objective = Objective(slo, TARGETS[0])
            lines.append(_sentence(findings, one, other, objective))
        if (found := turning_point(findings, one, other)) is not None:
            lines.append(f"{one} against {other}: {found}")
    return lines


def turning_point(findings: Findings, one: str, other: str) -> str | None:
    """At which k `one` stops being better than `other`, from the requests measured; None with fixed SLOs."""
    if {slo.name for slo in findings.slos} != {slo.name for slo in findings.alone.slos()}:
        return None
    ratios = list(_ratios(findings, one, other))
    if not ratios:
        return "nothing was measured by which their k could be compared"
    better = [k for k, ratio in ratios if ratio >= 1]
    worse = [k for k, ratio in ratios if ratio < 1]
    if not worse:
        return f"at least as good at every k from {ratios[0][0]:.2f} to {ratios[-1][0]:.2f}"
    if not better:
        return f"worse at every k from {ratios[0][0]:.2f} to {ratios[-1][0]:.2f}"
    if min(worse) > min(better):
        return f"stops paying at k = {min(worse):.2f}"
    return f"pays only from k = {min(better):.2f} on"


def format_estimate(found: Estimate | None) -> str:
    """As 2.31, or with the sign of a bound; a dash for none."""
    return "-" if found is None else f"{_sign(found.bound)}{found.value:.3g}"


def format_ratio(found: Ratio | None) -> str:
    """As 1.82 (1.61 to 2.05)."""
    return (
        "-"
        if found is None
        else f"{_sign(found.bound)}{found.value:.2f} ({found.low:.2f} to {found.high:.2f})"
    )


def _pairs(findings: Findings) -> list[tuple[str, str]]:
    """Split ones against the others; where there are only some of one kind, each against those before it."""
    split = [name for name in findings.names if findings.members[name].split]
    rest = [name for name in findings.names if name not in split]
    if split and rest:
        return [(one, other) for one in split for other in rest]
    return [(one, other) for at, one in enumerate(findings.names) for other in findings.names[:at]]


def _sentence(findings: Findings, one: str, other: str, objective: Objective) -> str:
    found = findings.ratio(one, other, objective)
    where = f"{objective.slo.name}: {one} against {other}"
    if found is None:
        return f"{where}: not measured"
    values = [format_estimate(findings.goodput(name, objective)) for name in (one, other)]
    detail = f"{values[0]} against {values[1]} requests/s, ratio {format_ratio(found)}"
    return f"{where}: **{_word(found)}**, {detail}"


def _word(found: Ratio) -> str:
    if found.bound != "<=" and found.value > 1 + LEVEL and found.low > 1:
        return "better" if found.bound != "?" else UNDECIDED
    if found.bound != ">=" and found.value < 1 - LEVEL and found.high < 1:
        return "worse" if found.bound != "?" else UNDECIDED
    return UNDECIDED if found.bound else "level, as far as this run can tell"


def _ratios(findings: Findings, one: str, other: str) -> Iterator[tuple[float, float]]:
    """(k, ratio of goodputs), where both lie between measured rates."""
    for factor in FACTORS:
        slo: Slo = findings.alone.slo(factor)
        left, right = (findings.goodput(name, Objective(slo, TARGETS[0])) for name in (one, other))
        if left and right and not left.bound and not right.bound:
            yield factor, left.value / right.value


def _sign(bound: str) -> str:
    return {"<=": "≤ ", ">=": "≥ ", "?": "? "}.get(bound, "")
