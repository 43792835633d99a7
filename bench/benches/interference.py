"""What a 2,048-token prompt every 3 s does to four running streams, by scheduling policy.

Each setting has a cluster of its own, one worker that does both, all processes on the same cores. The gaps
are those between events with text, as a client sees them. With `--url` the server there is measured as it
is, with the prompts and without.
"""

import argparse
from collections.abc import Mapping

from rich.table import Table

from bench.arguments import new_file, positive_number
from bench.client import open_client
from bench.cores import core_list, pinned_target
from bench.frame import Bench, Frame
from bench.interference import Gaps, listen
from bench.plots import plot_survival
from bench.report import Outcome, format_figure
from deploy.local.spec import ClusterSpec

SECONDS = 24.0
CHUNKS = (64, 128, 256)
WARM_UP_S = 2.0
SETTINGS: Mapping[str, Mapping[str, str]] = {
    "prefill_first": {"policy": "prefill_first"},
    **{f"decode_first_{chunk}": {"policy": "decode_first", "chunk_tokens": str(chunk)} for chunk in CHUNKS},
}
ALONE = "no_prompts"


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cores", type=core_list, default=(0,), help="cores of the cluster, as taskset does")
    parser.add_argument("--seconds", type=positive_number, default=SECONDS, help="length of each measurement")
    parser.add_argument("--plot", type=new_file, metavar="FILE", help="draw the gaps there, as PNG")


async def run(frame: Frame, arguments: argparse.Namespace) -> Outcome:
    if frame.url is not None:
        found = await _measure(frame, arguments, "with_prompts", {}, alone_too=True)
    else:
        found = []
        for name, settings in SETTINGS.items():
            found += await _measure(frame, arguments, name, settings, alone_too=not found)
    problems = tuple(problem for gaps in found for problem in gaps.problems)
    heard = [gaps for gaps in found if gaps.itl_ms]
    frame.console.print(_table(heard))
    if arguments.plot is not None:
        plot_survival(
            arguments.plot,
            {gaps.name: gaps.itl_ms for gaps in heard},
            title="4 streams, a prompt of 2,048 tokens every 3 s",
            quantity="time between two tokens of a stream, ms",
        )
    return Outcome({name: figure for gaps in heard for name, figure in gaps.figures().items()}, problems)


async def _measure(
    frame: Frame,
    arguments: argparse.Namespace,
    name: str,
    settings: Mapping[str, str],
    *,
    alone_too: bool,
) -> list[Gaps]:
    """One setting, on a fresh cluster; with `alone_too` also the streams without any prompts."""
    cores = ",".join(map(str, arguments.cores))
    spec = ClusterSpec(decode=1, topology="chunked", cores=cores, settings=settings)
    async with pinned_target(frame, arguments.cores, spec) as target, open_client(target.url) as client:
        await listen(client, name, WARM_UP_S, prompts=False)
        frame.note(f"{name}: {arguments.seconds:.0f} s")
        alone = [await listen(client, ALONE, arguments.seconds / 2, prompts=False)] if alone_too else []
        return [*alone, await listen(client, name, arguments.seconds, prompts=True)]


def _table(found: list[Gaps]) -> Table:
    table = Table(title="gaps between the tokens of a stream, ms", title_justify="left")
    table.add_column("setting", no_wrap=True)
    for column in ("p50", "p99", "max", "gaps", "TTFT of the prompts, p50"):
        table.add_column(column, justify="right")
    for gaps in found:
        figures = gaps.figures()
        ttft = figures.get(f"prompt_ttft_ms_p50_{gaps.name}")
        table.add_row(
            gaps.name,
            *(format_figure(figure) for figure in (gaps.p50, gaps.p99, gaps.longest)),
            f"{len(gaps.itl_ms):,}",
            "" if ttft is None else format_figure(ttft),
        )
    return table


BENCH = Bench("what long prompts do to running streams, by scheduling policy", run, options)
