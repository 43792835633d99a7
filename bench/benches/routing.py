"""One shared prefix, four workers: does it pile up on one, does anybody starve, how much of it is found?

Each policy gets a cluster of its own: a gateway, a router and four decode workers with a tiny model, which
are sent 400 prompts that share their first 480 tokens and have 32 of their own, 32 at a time. Then two
routers, whose views know nothing of each other, get one burst of 100 under the first policy. `max_over_mean`
is of requests per worker, `hit_share` of prompt tokens that were cached. Figures without a policy's name are
the first one's. Times are of machinery: the model is next to nothing, and all share the machine's cores.
"""

import argparse
import asyncio
import random
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import get_args

from rich.table import Table

from bench.client import closed_loop, open_client
from bench.cluster import ClusterFailed, own_cluster
from bench.frame import Bench, Frame
from bench.records import RequestRecord
from bench.report import Outcome, format_figure
from bench.routing.shares import Shares, figures, problems, shares_of
from bench.scrape import Change, Snapshot, scrape
from bench.tiny_model import FIRST_BYTE, save_tiny_model
from bench.workloads import RequestSpec, token_ids
from common.config import RoutingPolicyName
from deploy.local.spec import ClusterSpec, ProcessSpec, plan_processes

POLICIES: tuple[RoutingPolicyName, ...] = get_args(RoutingPolicyName)
WORKERS = 4
REQUESTS, CONCURRENCY, BURST = 400, 32, 100
SHARED_TOKENS, OWN_TOKENS, OUTPUT_TOKENS = 480, 32, 16
SHOWN_FAILURES = 5


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--policy",
        choices=(*POLICIES, "all"),
        nargs="+",
        default=["prefix_aware", "all"],
        help="in this order; default: prefix_aware, then all others",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the prompts (default: %(default)s)")


async def run(frame: Frame, arguments: argparse.Namespace) -> Outcome:
    named = [name for name in arguments.policy if name != "all"]
    rest = POLICIES if "all" in arguments.policy else ()
    policies = list(dict.fromkeys([*named, *rest]))
    failures: list[str] = []
    steady: dict[str, Shares] = {}
    with tempfile.TemporaryDirectory() as directory:
        model = await asyncio.to_thread(save_tiny_model, Path(directory) / "tiny")
        for policy in policies:
            specs = prompts(REQUESTS, f"{arguments.seed}/{policy}")
            steady[policy], records = await _measure(frame, model, policy, 1, specs, CONCURRENCY)
            failures += problems(policy, records, OUTPUT_TOKENS)
        specs = prompts(BURST, f"{arguments.seed}/burst")
        burst, records = await _measure(frame, model, policies[0], 2, specs, BURST)
        failures += problems("two routers", records, OUTPUT_TOKENS)
    frame.console.print(_table(steady, burst))
    return Outcome(figures(steady, burst), tuple(failures[:SHOWN_FAILURES]))


def prompts(count: int, seed: str) -> list[RequestSpec]:
    """`count` prompts of random bytes with one beginning."""
    rng = random.Random(seed)
    ids = (FIRST_BYTE, FIRST_BYTE + 256)
    shared = token_ids(rng, SHARED_TOKENS, ids)
    return [RequestSpec(shared + token_ids(rng, OWN_TOKENS, ids), OUTPUT_TOKENS) for _ in range(count)]


async def _measure(
    frame: Frame, model: Path, policy: str, routers: int, specs: Sequence[RequestSpec], concurrency: int
) -> tuple[Shares, list[RequestRecord]]:
    """`specs`, `concurrency` at a time, to a fresh cluster that routes by `policy`. Raises ClusterFailed."""
    settings = {
        "model": str(model),
        "dtype": "float32",
        "device": "cpu",
        "num_blocks": "2048",
        "threads": "1",
        "compile_model": "false",
        "routing_policy": policy,
    }
    spec = ClusterSpec(decode=WORKERS, topology="chunked", settings=settings)
    async with (
        own_cluster(spec, frame.console, plan=partial(_plan, routers=routers)) as target,
        open_client(target.url) as client,
    ):
        before = await _snapshots(target.workers)
        with frame.progress(f"{policy}, {routers} router{'s' * (routers > 1)}", len(specs)) as done:
            records = await closed_loop(client, specs, concurrency, done)
        after = await _snapshots(target.workers)
    changes = [Change(old, new) for old, new in zip(before, after, strict=True)]
    return shares_of(changes, records), records


def _plan(spec: ClusterSpec, *, routers: int) -> list[ProcessSpec]:
    """The processes of `spec`, with as many routers."""
    first, *others = plan_processes(spec)
    more = [
        replace(first, name=f"router-{number}", argv=(*first.argv, f"--instance=router-{number}"))
        for number in range(1, routers)
    ]
    return [first, *more, *others]


async def _snapshots(workers: Sequence[str]) -> list[Snapshot]:
    found = [await scrape([url]) for url in workers]
    if None in found:
        raise ClusterFailed("a worker does not tell its metrics")
    return [snapshot for snapshot in found if snapshot is not None]


def _table(steady: dict[str, Shares], burst: Shares) -> Table:
    table = Table("policy", title="routing", title_justify="left")
    for name in ("requests per worker", "max / mean", "cached", "TTFT p50 ms", "p90 ms"):
        table.add_column(name, justify="right")
    for name, shares in [*steady.items(), ("two routers, one burst", burst)]:
        numbers = (shares.max_over_mean, shares.hit_share, shares.ttft_ms(50), shares.ttft_ms(90))
        table.add_row(name, " ".join(map(str, shares.requests)), *map(format_figure, numbers))
    return table


BENCH = Bench(
    "one shared prefix over four workers, policies side by side: balance and hits", run, options, local=True
)
