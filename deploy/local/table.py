"""What a person sees of a cluster that starts: a live table on a terminal, plain lines elsewhere.

Knows nothing of processes but what a ChildProcess shows.
"""

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from deploy.local.processes import ChildProcess, State

LAST_LINES = 20
_STYLES: dict[State, str] = {
    "waiting": "dim",
    "starting": "yellow",
    "listening": "yellow",
    "ready": "green",
    "exited": "bold red",
}


class StartView:
    """A Watcher: shows every change of state. Use as a context manager around the start."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._children: dict[str, ChildProcess] = {}
        self._begin = time.monotonic()
        self._live = Live(console=console, get_renderable=self._table, refresh_per_second=4)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live.is_started:
            self._live.stop()

    def changed(self, child: ChildProcess) -> None:
        known = child.name in self._children
        self._children[child.name] = child
        if self._live.is_started or (child.state == "listening" and known):
            return
        seconds = time.monotonic() - self._begin
        where = f" {child.address}" if child.state == "ready" else ""
        self.line(f"{seconds:6.1f} s  {child.state:9} {child.name}{where}")
        if child.state == "exited" and child.was_ready:
            self.line(f"{child.name} ended with code {child.exit_code}; the end of {child.log}:")
            self.last_lines(child)

    def line(self, text: str) -> None:
        """One line as it is: never wrapped, coloured or cut, so that it can be copied and parsed."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def last_lines(self, child: ChildProcess) -> None:
        for line in child.last_lines(LAST_LINES):
            self.line(f"  {line}")

    def _table(self) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
        for heading in ("process", "state", "pid", "address"):
            table.add_column(heading, no_wrap=True)
        table.add_column("doing")  # rich narrows only columns that may wrap; the text itself is cut
        for child in self._children.values():
            news = "" if child.state == "ready" else (child.last_lines(1) or [""])[0]
            doing = Text(news, no_wrap=True, overflow="ellipsis")
            state = Text(child.state, style=_STYLES[child.state])
            table.add_row(child.name, state, str(child.pid or ""), child.address, doing)
        return table
