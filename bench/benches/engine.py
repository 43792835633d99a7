"""The engine alone, beside what the machine allows and beside plain transformers, in one pinned process.

Read bandwidth is the best of torch.sum and torch.dot over two buffers of 1 GiB, the matrix rate the best
bfloat16 product of 2048^3; both are taken before and after each cell, and the higher one counts. A decode
step must read the weights once and the KV of its batch once; a prefill must multiply every token with every
weight outside the embeddings, attend causally and project one row on the vocabulary. Times are medians of
rounds in turn with transformers' own forward (DynamicCache, sdpa, bfloat16). Greedy sampling is part of each.

With `--peer` another OpenAI server of the same model is asked the same as a cluster of ours, in turn: prompts
alone for their TTFT, and streams of 256 tokens on the average for the time from token to token.
"""

import argparse
import asyncio

from bench.cores import core_list
from bench.engine import rivals
from bench.engine.cells import FULL, QUICK, Measured
from bench.engine.contender import Effort
from bench.engine.duel import StreamsFailed, fight
from bench.engine.tables import cells_table, duels_table
from bench.frame import Bench, Frame, http_url
from bench.report import Outcome
from common.config import GatewaySettings, resolve
from common.model_files import resolve as model_directory

EFFORT = Effort(rounds=5, round_s=1.0)
QUICK_EFFORT = Effort(rounds=4, round_s=0.6)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cores", type=core_list, default=(0,), help="cores to stay on, as taskset writes them"
    )
    parser.add_argument("--quick", action="store_true", help="prefill 512, decode at batch 1 and 8 only")
    parser.add_argument("--eager", action="store_true", help="without compiling our model")
    parser.add_argument("--peer", type=http_url, metavar="URL", help="compare with the OpenAI server there")


async def run(frame: Frame, arguments: argparse.Namespace) -> Outcome:
    if arguments.peer is not None:
        return await _beside(frame, arguments)
    return await _alone(frame, arguments)


async def _beside(frame: Frame, arguments: argparse.Namespace) -> Outcome:
    cells = rivals.QUICK if arguments.quick else rivals.FULL
    try:
        duels = await fight(frame, arguments.peer, arguments.cores, cells)
    except StreamsFailed as error:
        return Outcome({}, (str(error),))
    frame.console.print(duels_table(duels))
    return Outcome({name: figure for duel in duels for name, figure in duel.figures().items()})


async def _alone(frame: Frame, arguments: argparse.Namespace) -> Outcome:
    # torch takes seconds to import, and other benches run where it is not installed.
    from bench.engine.trial import Trial

    cells, effort = (QUICK, QUICK_EFFORT) if arguments.quick else (FULL, EFFORT)
    settings = resolve(GatewaySettings, [])
    directory = model_directory(settings.model, settings.cache_path)
    trial = Trial(directory, arguments.cores, cells, eager=arguments.eager)
    measured: list[Measured] = []
    with frame.progress("cells", len(cells), still=True) as done:
        for one in trial.run(effort):
            measured.append(one)
            done(one)
            await asyncio.sleep(0)  # Ctrl-C and SIGTERM end the run here
    frame.note(f"our engine: {trial.mode}, on cores {','.join(map(str, arguments.cores))}")
    frame.console.print(cells_table(measured))
    figures = {name: figure for one in measured for name, figure in one.figures().items()}
    return Outcome(figures)


BENCH = Bench(
    "the engine alone: prefill and decode beside their bounds and transformers", run, options, local=True
)
