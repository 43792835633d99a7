"""How long work shows that it goes on: a bar on a terminal, a line now and then elsewhere."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

LINES = 5
"""How many lines the whole of a piece of work is worth in a log."""

Advance = Callable[[object], None]
"""Called once for each unit done, with whatever was done."""


@contextmanager
def progress(console: Console, what: str, total: int, *, still: bool = False) -> Iterator[Advance]:
    """`total` units of `what` are about to be done; calls beyond `total` are shown as they are.

    `still`: nothing is drawn between two calls, for measurements that want the core for themselves.
    """
    if console.is_terminal:
        with _bar(console, still) as bar:
            task = bar.add_task(what, total=total)
            bar.refresh()
            yield lambda _: bar.update(task, advance=1, refresh=still)
    else:
        yield _line_printer(console, what, total)


def _bar(console: Console, still: bool) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, auto_refresh=not still)


def _line_printer(console: Console, what: str, total: int) -> Advance:
    every, count = max(1, total // LINES), 0

    def advance(_: object) -> None:
        nonlocal count
        count += 1
        if count % every == 0 or count == total:
            console.print(f"{what}: {count} of {total}", highlight=False)

    return advance
