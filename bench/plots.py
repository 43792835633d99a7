"""Plots of samples as PNG files. Knows nothing of what the samples are."""

from collections.abc import Mapping, Sequence
from pathlib import Path

COLOURS = ("#5f6b7a", "#c1442e", "#2f6fb0", "#2e8b57", "#8a5fb0", "#c28a1a")


def plot_survival(path: Path, series: Mapping[str, Sequence[float]], *, title: str, quantity: str) -> None:
    """For each series, which share of its samples is longer than x, both axes logarithmic.

    The height at which a curve ends is one sample; the tail is what percentiles are read from.
    """
    # Takes a second to import and may be missing where only a server is measured.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogFormatter, ScalarFormatter

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for (name, samples), colour in zip(series.items(), COLOURS, strict=False):
        ordered = sorted(samples)
        shares = [(len(ordered) - index) / len(ordered) for index in range(len(ordered))]
        axes.step(ordered, shares, where="post", label=name, color=colour, linewidth=1.6)
    axes.set(
        xscale="log",
        yscale="log",
        ylim=(0.7 / max(len(samples) for samples in series.values()), 1.2),
        xlabel=quantity,
        ylabel="share of samples at or above it",
        title=title,
    )
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))
    axes.axhline(0.01, color="#999999", linewidth=0.8, linestyle=":")
    axes.text(0, 0.01, " p99", color="#777777", fontsize=8, va="bottom", transform=axes.get_yaxis_transform())
    axes.texts[0].set_in_layout(False)
    axes.grid(visible=True, which="major", color="#e5e5e5")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)
