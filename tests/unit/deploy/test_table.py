"""The live table of a start: long news of one process never hides the names and addresses of all."""

import io
from pathlib import Path

from rich.console import Console

from deploy.local.processes import ChildProcess
from deploy.local.table import StartView


def test_long_news_are_cut_and_the_other_columns_are_whole(tmp_path: Path) -> None:
    log = tmp_path / "prefill-0.log"
    log.write_text('{"event":"UCX self-test","options":"' + "x" * 500 + '"}\n')
    child = ChildProcess("prefill-0", "prefill", log)
    child.state, child.pid = "starting", 12345
    child.listening("http://127.0.0.1:34567")
    out = io.StringIO()
    console = Console(file=out, width=80, force_terminal=True, color_system=None)
    with StartView(console) as view:
        view.changed(child)
    row = next(line for line in out.getvalue().splitlines() if "prefill-0" in line)
    for cell in ("prefill-0", "listening", "12345", "http://127.0.0.1:34567", "UCX", "…"):
        assert cell in row
