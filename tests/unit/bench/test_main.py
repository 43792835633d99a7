"""The command line: what is listed, refused and handed over; the measurement itself is made up."""

import argparse
import asyncio
import os
import signal
from pathlib import Path

import orjson
import pytest
from rich.console import Console

from bench import __main__ as program
from bench.cluster import ClusterFailed
from bench.frame import Bench, Frame
from bench.registry import all_benches
from bench.report import Outcome


def fake(monkeypatch: pytest.MonkeyPatch, bench: Bench) -> Console:
    monkeypatch.setattr(program, "all_benches", lambda: {"fake": bench})
    return Console(width=120)


def outcome(figures: dict[str, float], *problems: str) -> Bench:
    async def run(_: Frame, __: argparse.Namespace) -> Outcome:
        return Outcome(figures, problems)

    return Bench("measures nothing", run)


def test_every_bench_is_there_with_one_line_about_it() -> None:
    benches = all_benches()
    assert "smoke" in benches
    assert all(bench.about and "\n" not in bench.about for bench in benches.values())


@pytest.mark.parametrize("argv", [[], ["--help"]])
def test_without_a_name_benches_are_listed(argv: list[str]) -> None:
    console = Console(width=120)
    with console.capture() as captured:
        assert program.main(argv, console) == 0
    assert "smoke" in captured.get()


def test_an_unknown_name_is_refused_with_the_choices(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["smokey"]) == 2
    assert "smoke" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv", [["--json", "/nowhere/out.json"], ["--json", "/"], ["--url", "localhost:8000"], ["--jso", "x"]]
)
def test_a_wrong_command_line_is_refused_before_anything_is_measured(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        program.main(["smoke", *argv])
    assert refused.value.code == 2


@pytest.mark.parametrize(
    "command",
    [
        "interference --seconds nan",
        "interference --seconds 0",
        "interference --plot /nowhere/plot.png",
        "gateway --seconds -1",
        "gateway --rate inf",
        "gateway --rate much",
    ],
)
def test_impossible_options_are_refused_before_anything_is_measured(command: str) -> None:
    with pytest.raises(SystemExit) as refused:
        program.main([*command.split(), "--url", "http://127.0.0.1:1"])
    assert refused.value.code == 2


def test_figures_go_to_the_screen_and_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    console = fake(monkeypatch, outcome({"ok": 3}))
    with console.capture() as captured:
        assert program.main(["fake", "--json", str(tmp_path / "out.json")], console) == 0
    assert "ok" in captured.get()
    assert orjson.loads((tmp_path / "out.json").read_bytes())["figures"] == {"ok": 3}


def test_a_problem_is_told_and_fails_the_run_but_figures_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    console = fake(monkeypatch, outcome({"failed": 1}, "request 3: 503"))
    with console.capture() as captured:
        assert program.main(["fake", "--json", str(tmp_path / "out.json")], console) == 1
    assert "request 3: 503" in captured.get()
    assert orjson.loads((tmp_path / "out.json").read_bytes())["figures"] == {"failed": 1}


def test_a_cluster_that_does_not_come_up_is_one_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def run(_: Frame, __: argparse.Namespace) -> Outcome:
        raise ClusterFailed("decode-0 ended with code 2")

    assert program.main(["fake"], fake(monkeypatch, Bench("fails", run))) == 1
    assert capsys.readouterr().err == "fake: decode-0 ended with code 2\n"


def test_a_termination_ends_the_bench_with_its_cleanup_done(monkeypatch: pytest.MonkeyPatch) -> None:
    cleaned = []

    async def run(_: Frame, __: argparse.Namespace) -> Outcome:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.Event().wait()
        finally:
            cleaned.append(True)
        raise AssertionError("not reached")

    assert program.main(["fake"], fake(monkeypatch, Bench("waits", run))) == 130
    assert cleaned == [True]
