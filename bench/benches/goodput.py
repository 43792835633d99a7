"""Which topology gives the highest goodput for a workload, on this machine: docs/benchmarks.md has the rules.

Each topology is a cluster of its own on the same cores; they take turns, rate by rate. SLOs come from one
unloaded measurement at the start: TTFT = 6 x that of the workload's prompts, TPOT = k x the step of eight
streams, k = 2.0, 1.5, 1.2. Figures are requests/s over all cores.
"""

import argparse
import os
from fractions import Fraction
from pathlib import Path

from bench.arguments import positive_number
from bench.cores import core_list
from bench.frame import Bench, Frame, http_url
from bench.goodput.campaign import compare
from bench.goodput.comparison import Comparison
from bench.goodput.contestants import AGAINST, Contestant, Instances, topologies
from bench.goodput.effort import FULL, QUICK, REQUESTS, Effort
from bench.goodput.measure import RequestsFailed
from bench.goodput.report import write_report
from bench.goodput.slo import Slo
from bench.goodput.verdict import sentences
from bench.goodput.workload import MIXES, TRACE, Workload, named, replayed
from bench.report import Outcome
from common.errors import ConfigError

REPORTS = Path(".galley/bench")
FIXED = "fixed"


def options(parser: argparse.ArgumentParser) -> None:
    about = "; ".join(f"{name}: {mix.about}" for name, mix in MIXES.items())
    parser.add_argument("--compare", default="", metavar="A,B,...", help="topologies to compare")
    parser.add_argument("--workload", required=True, choices=[*MIXES, TRACE], help=f"{about}; trace: --trace")
    parser.add_argument(
        "--quick", action="store_true", help="within 20 minutes; the report says what it gave up"
    )
    parser.add_argument("--report", type=Path, metavar="DIR", help=f"else {REPORTS}/goodput-WORKLOAD")
    machine = parser.add_argument_group("instances")
    machine.add_argument("--cores", type=core_list, help="cores of the workers, as taskset does; else all")
    machine.add_argument("--prefill", type=_count, default=1, help="prefill workers of split topologies")
    machine.add_argument("--decode", type=_count, default=1, help="their decode workers")
    load = parser.add_argument_group("load")
    load.add_argument("--requests", type=_count, default=REQUESTS, help=f"at each rate, {REQUESTS} at least")
    load.add_argument(
        "--cv", type=positive_number, default=1.0, help="of the gaps: 1 Poisson, more is bursty (Gamma)"
    )
    load.add_argument(
        "--trace", type=Path, metavar="FILE", help="Mooncake or Azure form, for --workload trace"
    )
    load.add_argument("--length-scale", type=_fraction, default=Fraction(1), help="of a trace, as 1/16")
    other = parser.add_argument_group("servers of others, and fixed SLOs")
    other.add_argument("--against", type=_urls, default=(), metavar="URL,...", help="asked round robin")
    other.add_argument("--ttft", type=positive_number, help="fixed TTFT budget in s, with --tpot")
    other.add_argument("--tpot", type=positive_number, help="fixed TPOT budget in s")


async def run(frame: Frame, arguments: argparse.Namespace) -> Outcome:
    comparison = _comparison(arguments)
    arrivals = _arrivals(arguments)
    frame.note(
        f"{comparison.workload.name}: {comparison.workload.about}. {arrivals}, {comparison.effort.name} run"
    )
    try:
        findings = await compare(comparison, frame)
    except RequestsFailed as error:
        return Outcome({}, (str(error),))
    folder = arguments.report or REPORTS / f"goodput-{comparison.workload.name}"
    frame.note(f"report: {write_report(folder, comparison, findings, arrivals)}")
    for sentence in sentences(findings):
        frame.note(sentence.replace("**", ""))
    figures = findings.figures()
    headline = tuple(name for name in figures if not name.endswith(("_low", "_high", "_99")))
    return Outcome(figures, findings.problems(), headline)


def _comparison(arguments: argparse.Namespace) -> Comparison:
    """Raises ConfigError for what does not go together."""
    cores = arguments.cores or tuple(sorted(os.sched_getaffinity(0)))
    instances = Instances(arguments.prefill, arguments.decode, cores)
    contestants = topologies([name for name in arguments.compare.split(",") if name], instances)
    if arguments.against:
        contestants.append(Contestant(AGAINST, urls=arguments.against))
    if not contestants:
        raise ConfigError("compare what? --compare A,B or --against URL", param="compare")
    return Comparison(
        _workload(arguments), contestants, instances, _effort(arguments), fixed=_fixed_slos(arguments)
    )


def _workload(arguments: argparse.Namespace) -> Workload:
    if (arguments.workload == TRACE) != (arguments.trace is not None):
        raise ConfigError("--workload trace and --trace FILE go together", param="trace")
    if arguments.trace is None:
        return named(arguments.workload, arguments.cv)
    try:
        return replayed(arguments.trace, arguments.length_scale)
    except ValueError as error:
        raise ConfigError(str(error), param="length-scale") from error


def _effort(arguments: argparse.Namespace) -> Effort:
    if arguments.requests < REQUESTS:
        raise ConfigError(f"fewer than {REQUESTS} requests a rate say too little", param="requests")
    return (QUICK if arguments.quick else FULL).with_requests(arguments.requests)


def _fixed_slos(arguments: argparse.Namespace) -> tuple[Slo, ...]:
    if (arguments.ttft is None) != (arguments.tpot is None):
        raise ConfigError("--ttft and --tpot go together", param="ttft")
    return () if arguments.ttft is None else (Slo(FIXED, arguments.ttft, arguments.tpot),)


def _arrivals(arguments: argparse.Namespace) -> str:
    if arguments.trace is not None:
        return "Arrivals as recorded, faster or slower"
    return "Poisson arrivals" if arguments.cv == 1 else f"Gamma arrivals, cv {arguments.cv:g}"


def _urls(text: str) -> tuple[str, ...]:
    return tuple(http_url(part) for part in text.split(",") if part)


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return int(text)


def _fraction(text: str) -> Fraction:
    try:
        return Fraction(text)
    except (ValueError, ZeroDivisionError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no number and no fraction such as 1/16") from error


BENCH = Bench("which topology gives the highest goodput for a workload", run, options, local=True)
