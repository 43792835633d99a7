"""How many of a trace's prefixes are found again, against one cache that never forgets: routing's share.

A trace of real conversations is replayed in virtual time against a whole cluster of fake models with pools
that never fill up (bench/replay/). Lengths are a sixteenth, so that a block of 512 tokens is one of 32.
`hit_rate` is tokens found over tokens asked for, `hit_rate_ideal` what there was to find. Several policies
are replayed one after another and told side by side; figures without a policy's name are the first one's.
"""

import argparse
import asyncio
import logging
import threading
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import get_args

import structlog
from rich.table import Table

from bench.frame import Bench, Frame
from bench.progress import Advance
from bench.replay.ideal import ideal_hit_rate
from bench.replay.simulation import Replay, Replayer
from bench.report import Outcome, format_figure
from bench.traces import Trace, read_trace
from bench.virtual.loop import run_virtual
from common.config import RoutingPolicyName
from common.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared" / "traces" / "mooncake_conversation_4000.jsonl"
SAMPLE = ROOT / "bench" / "data" / "mooncake_conversation_400.jsonl"
POLICIES: tuple[RoutingPolicyName, ...] = get_args(RoutingPolicyName)
LIMIT_S = 1e6
"""Virtual time in which any replay has ended."""
SHOWN_FAILURES = 5


class GivenUp(Exception):
    """The bench was cancelled meanwhile."""


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="of Mooncake's or Azure's form; else Mooncake's 4,000 conversations, or the 400 in bench/data",
    )
    parser.add_argument(
        "--policy",
        type=_policies,
        default=["prefix_aware"],
        metavar="A,B,...",
        help=f"one or more of {', '.join(POLICIES)} (default: prefix_aware), or all",
    )
    parser.add_argument("--workers", type=_positive, default=4, help="decode workers (default: %(default)s)")
    parser.add_argument("--requests", type=_positive, help="only so many, from the trace's begin")
    parser.add_argument(
        "--length", type=_factor, default=Fraction(1, 16), help="scales lengths (default: %(default)s)"
    )
    parser.add_argument(
        "--time", type=_factor, default=Fraction(1), help="scales times; 1/2 is twice as fast"
    )
    parser.add_argument("--seed", type=int, default=0, help="of prompts and draws (default: %(default)s)")


async def run(frame: Frame, arguments: argparse.Namespace) -> Outcome:
    trace = _trace(frame, arguments)
    ideal = ideal_hit_rate(trace)
    if not ideal:
        frame.note("the trace does not tell which prompts begin alike: there are no hits to be had")
    replays: dict[str, Replay] = {}
    for policy in arguments.policy:
        with frame.progress(policy, len(trace.requests)) as done:
            replays[policy] = await _in_a_thread(trace, policy, arguments, done)
    frame.console.print(_table(replays, ideal))
    failures = [line for replay in replays.values() for line in replay.failures]
    return Outcome(figures(replays, ideal, len(trace.requests)), tuple(failures[:SHOWN_FAILURES]))


def figures(replays: dict[str, Replay], ideal: float, requests: int) -> dict[str, float]:
    """The first policy's plain, each one's with its name; rates only where there is something to hit."""
    found: dict[str, float] = {"requests": requests}
    if ideal:
        found["hit_rate_ideal"] = ideal
    for number, (policy, replay) in enumerate(replays.items()):
        its: dict[str, float] = {
            "max_over_mean": replay.max_over_mean,
            "ttft_s_p50": replay.ttft(50),
            "ttft_s_p99": replay.ttft(99),
        }
        if ideal:
            its |= {"hit_rate": replay.hit_rate, "hit_rate_over_ideal": replay.hit_rate / ideal}
        found |= its if number == 0 else {}
        found |= {f"{name}_{policy}": value for name, value in its.items()}
    return found


def _trace(frame: Frame, arguments: argparse.Namespace) -> Trace:
    path = arguments.trace or (SHARED if SHARED.is_file() else SAMPLE)
    if path == SAMPLE:
        frame.note(f"{SHARED} is not there: its first 400 requests, which come along, are replayed")
    trace = read_trace(path)
    if arguments.requests is not None:
        trace = Trace(trace.requests[: arguments.requests], trace.block_tokens)
    try:
        trace = trace.scaled(length=arguments.length, time=float(arguments.time))
    except ValueError as error:
        raise ConfigError(f"{path}: {error}", param="length") from error
    frame.note(
        f"{len(trace.requests)} requests of {path.name} in {trace.requests[-1].at_s:.0f} virtual seconds to"
        f" {arguments.workers} workers, blocks of {trace.block_tokens} tokens, seed {arguments.seed}"
    )
    return trace


async def _in_a_thread(
    trace: Trace, policy: RoutingPolicyName, arguments: argparse.Namespace, done: Advance
) -> Replay:
    """Beside the bench's own loop, so that Ctrl-C is heard: it ends the replay at its next request."""
    stopped = threading.Event()

    def advance(number: object) -> None:
        if stopped.is_set():
            raise GivenUp
        done(number)

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    try:
        replayer = partial(Replayer, trace, policy, arguments.workers, arguments.seed, advance)
        return await asyncio.to_thread(lambda: run_virtual(replayer().run(), limit_s=LIMIT_S))
    finally:
        stopped.set()


def _table(replays: dict[str, Replay], ideal: float) -> Table:
    table = Table("policy", title="replay", title_justify="left")
    for name in ("hit rate", "of ideal", "max / mean", "requests per worker", "TTFT p50 s", "p99 s"):
        table.add_column(name, justify="right")
    for policy, replay in replays.items():
        share = format_figure(replay.hit_rate / ideal) if ideal else "-"
        counts = " ".join(map(str, replay.requests))
        numbers = (replay.hit_rate, replay.max_over_mean, replay.ttft(50), replay.ttft(99))
        rate, most, half, last = map(format_figure, numbers)
        table.add_row(policy, rate, share, most, counts, half, last)
    return table


def _policies(text: str) -> list[RoutingPolicyName]:
    chosen = list(POLICIES) if text == "all" else [name for name in POLICIES if name in text.split(",")]
    if not chosen or (text != "all" and set(text.split(",")) - set(POLICIES)):
        raise argparse.ArgumentTypeError(f"choose from {', '.join(POLICIES)}, or all")
    return sorted(chosen, key=text.split(",").index) if text != "all" else chosen


def _factor(text: str) -> Fraction:
    try:
        factor = Fraction(text)
    except (ValueError, ZeroDivisionError):
        factor = Fraction(0)
    if factor <= 0:
        raise argparse.ArgumentTypeError("must be a number above 0, such as 1/16")
    return factor


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


BENCH = Bench("a trace in virtual time: prefix hits against an ideal cache", run, options, local=True)
