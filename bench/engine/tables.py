"""Cells as tables for the screen. Knows nothing of how they were measured."""

from collections.abc import Sequence
from statistics import median

from rich.table import Table

from bench.engine.cells import Measured, Prefill
from bench.engine.rivals import Duel
from bench.report import format_figure


def cells_table(measured: Sequence[Measured]) -> Table:
    """One line for each cell: ours beside the bound and plain transformers."""
    table = Table(title="engine", title_justify="left")
    table.add_column("cell", no_wrap=True)
    for column in ("ours ms", "tok/s", "bound ms", "of bound", "transf. ms", "faster"):
        table.add_column(column, justify="right", no_wrap=True)
    for one in measured:
        tokens = one.cell.tokens if isinstance(one.cell, Prefill) else one.cell.batch
        table.add_row(
            str(one.cell),
            f"{1e3 * one.ours_s:,.1f}",
            f"{tokens / one.ours_s:,.0f}",
            f"{1e3 * one.bound_s:,.1f}",
            f"{one.bound_s / one.ours_s:.0%}"
            if isinstance(one.cell, Prefill)
            else f"{one.ours_s / one.bound_s:.2f}x",
            f"{1e3 * one.plain_s:,.1f}",
            f"{one.speedup:.2f}x",
        )
    return table


def duels_table(duels: Sequence[Duel]) -> Table:
    """One line for each cell: medians of both servers, and how many times as fast ours was, by round too."""
    table = Table(title="ours through its gateway, and the peer", title_justify="left")
    table.add_column("cell", no_wrap=True)
    for column in ("ours", "peer", "faster by", "in the rounds"):
        table.add_column(column, justify="right", no_wrap=True)
    for duel in duels:
        table.add_row(
            duel.cell.name(duel.cell.unit),
            *(format_figure(median(figures)) for figures in (duel.ours, duel.peer)),
            f"{duel.advantage:.2f}x",
            " ".join(f"{advantage:.2f}" for advantage in duel.advantages),
        )
    return table
