"""What is handed over: numbers only, the machine they hold for, and the version."""

import math
import os
import platform
from pathlib import Path

import orjson
import pytest
from rich.console import Console

from bench.machine import describe_machine, describe_version
from bench.progress import progress
from bench.report import Outcome, figures_table, format_figure, write_json


def test_the_file_has_figures_machine_and_version(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    write_json(file, {"ttft_ms_p50": 12.5, "ok": True, "transfer_bytes": 3e6})
    document = orjson.loads(file.read_bytes())
    assert document["figures"] == {"ttft_ms_p50": 12.5, "ok": 1, "transfer_bytes": 3_000_000}
    assert type(document["figures"]["ok"]) is int
    assert document["machine"]["cores"] == os.cpu_count()
    assert document["machine"]["python"] == platform.python_version()
    assert document["version"] == describe_version()


def test_the_machine_is_named_without_torch_being_imported() -> None:
    machine = describe_machine()
    assert machine["cpu"]
    assert isinstance(machine["memory_gib"], float)
    assert machine["memory_gib"] > 0
    assert {"torch", "platform"} <= machine.keys()


@pytest.mark.parametrize("figure", [math.nan, math.inf])
def test_what_is_no_number_is_refused(figure: float) -> None:
    with pytest.raises(ValueError):
        Outcome({"ttft_ms_p50": figure})


@pytest.mark.parametrize(
    ("figure", "shown"),
    [(40, "40"), (1234567, "1,234,567"), (0.012341, "0.01234"), (12.3456, "12.35"), (1234.567, "1,234.57")],
)
def test_figures_are_shown_readably(figure: float, shown: str) -> None:
    assert format_figure(figure) == shown


def test_the_table_has_every_figure() -> None:
    console = Console(width=80)
    with console.capture() as captured:
        console.print(figures_table("smoke", {"ok": 40, "failed": 0}))
    text = captured.get()
    assert all(word in text for word in ("smoke", "ok", "40", "failed"))


def test_progress_without_a_terminal_is_a_few_lines() -> None:
    console = Console(width=80, force_terminal=False)
    with console.capture() as captured, progress(console, "requests", 40) as done:
        for number in range(40):
            done(number)
    lines = captured.get().splitlines()
    assert lines == [f"requests: {count} of 40" for count in (8, 16, 24, 32, 40)]


def test_progress_on_a_terminal_leaves_nothing_behind_but_runs() -> None:
    console = Console(width=80, force_terminal=True)
    with console.capture() as captured, progress(console, "requests", 2) as done:
        done(1)
    assert "requests" in captured.get()
