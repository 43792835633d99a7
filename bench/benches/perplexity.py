"""Is our bfloat16 as good as transformers': perplexity on docstrings of Python's standard library.

20,480 tokens in windows of 2,048 that know nothing of each other; every token but a window's first is
scored. Ours comes out of the paged pool as log probabilities of prompts do; theirs is one plain forward.
"""

import argparse
import asyncio
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from bench.cores import core_list
from bench.corpus import standard_library_docstrings
from bench.frame import Bench, Frame
from bench.report import Outcome
from common.config import GatewaySettings, resolve
from common.model_files import resolve as model_directory

WINDOW = 2048
WINDOWS = 10
ALLOWED_PERCENT = 0.5


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cores", type=core_list, default=(0,), help="cores to stay on, as taskset writes them"
    )
    parser.add_argument("--eager", action="store_true", help="without compiling our model")


async def run(frame: Frame, arguments: argparse.Namespace) -> Outcome:
    # torch takes seconds to import, and other benches run where it is not installed.
    from bench.engine.trial import Pair

    settings = resolve(GatewaySettings, [])
    directory = model_directory(settings.model, settings.cache_path)
    texts = windows(_tokens(directory))
    pair = Pair(directory, arguments.cores, [(1, WINDOW)], eager=arguments.eager)
    ours: list[float] = []
    plain: list[float] = []
    with frame.progress("windows", len(texts)) as done:
        for tokens in texts:
            ours += pair.ours.logprobs(tokens)
            plain += pair.plain.logprobs(tokens)
            done(tokens)
            await asyncio.sleep(0)  # Ctrl-C and SIGTERM end the run here
    frame.note(f"our engine: {pair.mode}")
    return outcome(ours, plain)


def windows(tokens: Sequence[int]) -> list[Sequence[int]]:
    """Whole windows, one after the other. Raises ValueError when there is less text than that."""
    if len(tokens) < WINDOWS * WINDOW:
        raise ValueError(f"{len(tokens)} tokens of docstrings are fewer than {WINDOWS * WINDOW}")
    return [tokens[i * WINDOW : (i + 1) * WINDOW] for i in range(WINDOWS)]


def outcome(ours: Sequence[float], plain: Sequence[float]) -> Outcome:
    """Both perplexities from log probabilities of the same tokens, and how far apart they are."""
    perplexity, reference = (math.exp(-mean(logprobs)) for logprobs in (ours, plain))
    percent = 100 * (perplexity / reference - 1)
    apart = mean(abs(one - other) for one, other in zip(ours, plain, strict=True))
    figures = {
        "perplexity": perplexity,
        "perplexity_transformers": reference,
        "perplexity_difference_percent": percent,
        "logprob_difference_mean": apart,
        "tokens_scored": len(ours),
    }
    wrong = abs(percent) > ALLOWED_PERCENT
    problem = f"perplexity differs by {percent:+.2f} % from transformers', {ALLOWED_PERCENT} % are allowed"
    return Outcome(figures, (problem,) if wrong else ())


def _tokens(directory: Path) -> list[int]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokens: list[int] = []
    for text in standard_library_docstrings():
        tokens += tokenizer.encode(text + "\n\n", add_special_tokens=False)
        if len(tokens) >= WINDOWS * WINDOW:
            break
    return tokens


BENCH = Bench("perplexity of our bfloat16 beside transformers'", run, options, local=True)
