"""What a bench hands over: figures for the screen and for `--json FILE`.

Knows nothing of how figures come about.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import orjson
from rich.table import Table

from bench.machine import describe_machine, describe_version

BenchFigures = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a bench found. `figures` are finite numbers (true is 1), named as others will look them up;
    `problems` say, one line each, why the run must count as failed. `headline` are those of the figures that
    are shown on the screen, where all would be too many.

    Raises ValueError for a figure that is no number: JSON could not carry it.
    """

    figures: BenchFigures
    problems: tuple[str, ...] = field(default=())
    headline: tuple[str, ...] = field(default=())

    @property
    def shown(self) -> BenchFigures:
        return {name: self.figures[name] for name in self.headline} if self.headline else self.figures

    def __post_init__(self) -> None:
        for name, figure in self.figures.items():
            if not math.isfinite(figure):
                raise ValueError(f"figure {name} is {figure}, which is no measurement")


def figures_table(title: str, figures: BenchFigures) -> Table:
    """The figures as a table of two columns, for rich."""
    table = Table("figure", title=title, title_justify="left")
    table.add_column("value", justify="right")
    for name, figure in figures.items():
        table.add_row(name, format_figure(figure))
    return table


def format_figure(figure: float) -> str:
    """Whole numbers in full, others with four significant digits or the two first decimals."""
    if figure == int(figure):
        return f"{int(figure):,}"
    return f"{figure:,.2f}" if abs(figure) >= 100 else f"{figure:.4g}"


def write_json(path: Path, figures: BenchFigures) -> None:
    """Write figures, machine and version. Every figure becomes a JSON number."""
    document = {
        "figures": {name: _as_number(figure) for name, figure in figures.items()},
        "machine": describe_machine(),
        "version": describe_version(),
    }
    path.write_bytes(orjson.dumps(document, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


def _as_number(figure: float) -> int | float:
    return int(figure) if figure == int(figure) else float(figure)
