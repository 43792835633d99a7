"""The report: what stands in it, and that its plots and data are there."""

from pathlib import Path

import orjson

from bench.goodput.comparison import Comparison
from bench.goodput.effort import FULL, QUICK
from bench.goodput.findings import Findings
from bench.goodput.report import DATA, RATES_PLOT, SCALES_PLOT, table, write_report
from bench.goodput.sweep import SweepRow
from bench.goodput.workload import named
from tests.unit.bench.goodput.made_up import INSTANCES, members, trial, typical

PNG = b"\x89PNG"


def report(found: Findings, folder: Path) -> str:
    comparison = Comparison(named("long-prompt", 1.0), list(found.members.values()), INSTANCES, found.effort)
    return write_report(folder, comparison, found, "Poisson arrivals").read_text()


def test_it_says_what_was_found_how_and_what_it_gave_up(tmp_path: Path) -> None:
    text = report(typical(), tmp_path / "new" / "folder")
    for part in (
        "| k12, 90% | 1.23 | 4.44 |",
        "disaggregated over colocated | ",
        "TTFT 600 ms and TPOT 12.00 ms",
        "engine compiled",
        "Given up for speed",
        "given up: later than any budget allows (50)",
        "| client | gateway |",
        "Tightest scale with 90 % at 4 requests/s: colocated 2.05, disaggregated 0.76",
        f"]({RATES_PLOT})",
    ):
        assert part in text, part
    assert "Warning" not in text
    for name in (RATES_PLOT, SCALES_PLOT):
        assert (tmp_path / "new" / "folder" / name).read_bytes().startswith(PNG)


def test_every_request_is_in_the_data(tmp_path: Path) -> None:
    report(typical(), tmp_path)
    data = orjson.loads((tmp_path / DATA).read_bytes())
    assert [len(one["requests"]) for one in data["trials"]] == [100] * 6
    assert data["trials"][0]["requests"][0]["tpot_s"] == 0.011


def test_the_sweep_shows_who_goes_on(tmp_path: Path) -> None:
    found = typical()
    chosen, other = (members("chunked")["chunked"].using({"chunk_tokens": size}) for size in ("64", "128"))
    found.members = {**found.members, "chunked": chosen}
    found.trials["chunked"] = []
    found.sweep = [SweepRow(one, trial("chunked", 0, {11: 40})) for one in (chosen, other)]
    lines = [
        line for line in report(found, tmp_path).splitlines() if line.startswith("| chunked, chunk_tokens")
    ]
    assert [line.endswith("goes on |") for line in lines] == [True, False]


def test_warnings_stand_at_the_top(tmp_path: Path) -> None:
    found = typical()
    found.out_of_time = ["colocated"]
    found.add(trial("colocated", 3, {30: 99}, ["500: it broke"]))
    head = report(found, tmp_path).split("## Goodput")[0]
    assert "500: it broke" in head
    assert "time was up before the search was finished for colocated" in head


def test_a_table_is_markdown() -> None:
    assert table(["a", "b"], [["1", "2"]]) == "| a | b |\n| --- | ---: |\n| 1 | 2 |"


def test_only_a_quick_run_gives_something_up() -> None:
    assert FULL.gave_up() == []
    assert len(QUICK.gave_up()) == 5
