"""`python -m bench NAME [--json FILE] [--url URL]`; without a name, the list of benches.

Exit codes: 0 measured and all well; 1 a request failed or no server came up; 2 a wrong command line.
"""

import argparse
import asyncio
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import uvloop
from rich.console import Console
from rich.table import Table

from bench.arguments import new_file
from bench.client import ServerRefused
from bench.cluster import ClusterFailed
from bench.frame import Bench, Frame, http_url
from bench.registry import all_benches
from bench.report import Outcome, figures_table, write_json
from common.errors import ConfigError

PROGRAM = "python -m bench"


def main(argv: Sequence[str], console: Console | None = None) -> int:
    """Run what `argv` (without the program's name) asks for; gives the exit code."""
    console = console or Console()
    benches = all_benches()
    if not argv or argv[0] in ("-h", "--help"):
        console.print(_listing(benches))
        return 0
    name, *rest = argv
    if name not in benches:
        sys.stderr.write(f"there is no bench {name}; there are: {', '.join(benches)}\n")
        return 2
    bench = benches[name]
    arguments = _parser(name, bench).parse_args(rest)
    frame = Frame(console, arguments.url, arguments.router)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            outcome = runner.run(_until_terminated(bench, frame, arguments))
    except (ServerRefused, ClusterFailed) as error:
        sys.stderr.write(f"{name}: {error}\n")
        return 1
    except ConfigError as error:
        sys.stderr.write(f"{name}: {error.message}\n")
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 130
    return _hand_over(name, outcome, console, arguments.json)


async def _until_terminated(bench: Bench, frame: Frame, arguments: argparse.Namespace) -> Outcome:
    """SIGTERM ends a bench as Ctrl-C does: by cancelling it, so that its cluster is stopped on the way."""
    task = asyncio.ensure_future(bench.run(frame, arguments))

    def stop() -> None:
        # make passes on what its whole process group got already: a second one must not cut the stop short.
        if not task.cancelling():
            task.cancel()

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop)
    return await task


def _hand_over(name: str, outcome: Outcome, console: Console, json_file: Path | None) -> int:
    console.print(figures_table(name, outcome.shown))
    for problem in outcome.problems:
        console.print(f"failed: {problem}", style="red", highlight=False, markup=False)
    if json_file is not None:
        write_json(json_file, outcome.figures)
    return 1 if outcome.problems else 0


def _parser(name: str, bench: Bench) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"{PROGRAM} {name}", description=bench.about, allow_abbrev=False)
    parser.add_argument("--json", type=new_file, metavar="FILE", help="write figures and machine there")
    if bench.local:
        parser.set_defaults(url=None, router=None)
    else:
        _add_target_options(parser)
    bench.options(parser)
    return parser


def _add_target_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url", type=http_url, help="measure the gateway there; else a cluster is started and stopped"
    )
    parser.add_argument(
        "--router", type=http_url, metavar="URL", help="its router; else port 8001 of the gateway's host"
    )


def _listing(benches: dict[str, Bench]) -> Table:
    table = Table("bench", "what it measures", title=f"{PROGRAM} NAME [--help]", title_justify="left")
    for name, bench in benches.items():
        table.add_row(name, bench.about)
    return table


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
