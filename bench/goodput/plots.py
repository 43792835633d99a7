"""The two plots of the DistServe paper: attainment against rate, and against how tight the SLOs are.

Knows nothing of how anything was measured.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bench.goodput.findings import Findings
from bench.goodput.slo import TARGETS, Slo
from bench.plots import COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SCALES = tuple(0.3 * 1.06**step for step in range(41))
"""Of both budgets, from 0.3 to 3."""


def plot_rates(path: Path, findings: Findings) -> None:
    """Attainment against requests/s, one panel for each SLO; hollow where a trial was given up."""
    figure, panels = _figure(len(findings.slos))
    for axes, slo in zip(panels, findings.slos, strict=True):
        for name, colour in zip(findings.names, COLOURS, strict=False):
            trials = findings.best_trials(name)
            shares = [trial.attainment(slo) for trial in trials]
            rates = [trial.rate for trial in trials]
            axes.plot(rates, shares, color=colour, linewidth=1.4, label=name, zorder=2)
            for trial, share in zip(trials, shares, strict=True):
                face = colour if trial.complete else "white"
                axes.plot([trial.rate], [share], "o", markersize=5, color=colour, markerfacecolor=face)
        axes.set(xlabel="requests/s, all cores", title=_budgets(slo))
        axes.set_xlim(left=0)
        _finish(axes)
    _save(figure, panels, f"{findings.workload}: requests within their SLO", path)


def plot_scales(path: Path, findings: Findings, rung: int, base: Slo) -> None:
    """Attainment at one rate against a factor on both budgets of `base`, of those who completed it."""
    figure, [axes] = _figure(1)
    for name, colour in zip(findings.names, COLOURS, strict=False):
        if (trial := findings.at(name, rung)) is not None:
            shares = [trial.attainment(base.scaled(scale)) for scale in SCALES]
            axes.plot(SCALES, shares, color=colour, linewidth=1.6, label=name)
    axes.set(
        xlabel=f"SLO scale (1 is TTFT {1e3 * base.ttft_s:.0f} ms, TPOT {1e3 * base.tpot_s:.1f} ms)",
        title=f"at {findings.ladder.rate(rung):.3g} requests/s",
    )
    axes.invert_xaxis()
    _finish(axes)
    _save(figure, [axes], f"{findings.workload}: how tight the SLO may be", path)


def tightest_scales(findings: Findings, rung: int, base: Slo, target: float) -> Mapping[str, float]:
    """The smallest factor on both budgets of `base` at which `target` is met at a rung, by contestant."""
    found = {}
    for name in findings.names:
        trial = findings.at(name, rung)
        met = [scale for scale in SCALES if trial and trial.attainment(base.scaled(scale)) >= target]
        if met:
            found[name] = min(met)
    return found


def _figure(count: int) -> "tuple[Figure, list[Axes]]":
    # Takes a second to import and may be missing where only a server is measured.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6 * count + 1.4, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(1, count, sharey=True, squeeze=False)[0])


def _finish(axes: "Axes") -> None:
    axes.set_ylim(0, 1.03)
    for target in TARGETS:
        axes.axhline(target, color="#999999", linewidth=0.8, linestyle=":")
    axes.grid(visible=True, which="major", color="#ededed")


def _save(figure: "Figure", panels: "Sequence[Axes]", title: str, path: Path) -> None:
    panels[0].set_ylabel("share of requests")
    panels[0].legend(frameon=False, loc="lower left")
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def _budgets(slo: Slo) -> str:
    return f"{slo.name}: TTFT {1e3 * slo.ttft_s:.0f} ms, TPOT {1e3 * slo.tpot_s:.1f} ms"
