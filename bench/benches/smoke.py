"""Does it work, and roughly how fast: 40 streamed requests of mixed length, a few at a time.

Prompts are 8 to 600 words, answers 16 to 32 tokens, greedy. One request before them warms the server up
and is not counted. TTFT and TPOT are the client's, p99 of 40 is close to the slowest. KV transfer
figures are the decode workers' own.
"""

import argparse
import secrets
from collections.abc import Sequence

from bench.client import closed_loop, open_client
from bench.frame import Bench, Frame
from bench.records import RequestRecord
from bench.report import Outcome
from bench.scrape import Change, change_between, scrape
from bench.stats import percentile, percentile_figures
from bench.workloads import RequestSpec, mixed, requests, text_of_words, uniform

REQUESTS = 40
CONCURRENCY = 4
PROMPT_WORDS = mixed((0.5, uniform(8, 64)), (0.3, uniform(65, 256)), (0.2, uniform(257, 600)))
OUTPUT_TOKENS = uniform(16, 32)
SHOWN_FAILURES = 5


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--seed",
        type=int,
        help="of the prompts; else 0 on a cluster of our own, and a new one on yours, which may have seen 0",
    )


async def run(frame: Frame, arguments: argparse.Namespace) -> Outcome:
    seed = arguments.seed
    if seed is None:
        seed = 0 if frame.url is None else secrets.randbelow(2**31)
    warm_up, *specs = requests(REQUESTS + 1, PROMPT_WORDS, OUTPUT_TOKENS, seed=seed, prompts=text_of_words)
    async with frame.target() as target, open_client(target.url) as client:
        frame.note(
            f"{REQUESTS} requests to {client.model} at {target.url}, {CONCURRENCY} at a time, seed {seed}"
        )
        await closed_loop(client, [warm_up], 1)
        before = await scrape(target.workers)
        with frame.progress("requests", len(specs)) as done:
            records = await closed_loop(client, specs, CONCURRENCY, done)
        change = change_between(before, await scrape(target.workers))
    if change is None:
        frame.note("transfer figures are left out: no router told of workers that answer (--router URL)")
    failures = list(_failures(specs, records))
    figures = _latencies(records) | _transfers(records, change)
    figures |= {"ok": len(records) - len(failures), "failed": len(failures)}
    return Outcome(figures, _shown(failures))


def _failures(specs: Sequence[RequestSpec], records: Sequence[RequestRecord]) -> list[str]:
    """One line for each request that was refused, broke off or came back short."""
    lines = []
    for number, (spec, record) in enumerate(zip(specs, records, strict=True)):
        if record.error:
            lines.append(f"request {number}: {record.error}")
        elif record.output_tokens != spec.max_tokens:
            lines.append(f"request {number}: {record.output_tokens} of {spec.max_tokens} tokens came")
    return lines


def _latencies(records: Sequence[RequestRecord]) -> dict[str, float]:
    ttft = [1e3 * record.ttft_s for record in records if record.ok and record.ttft_s is not None]
    tpot = [1e3 * record.tpot_s for record in records if record.ok and record.tpot_s is not None]
    return percentile_figures("ttft_ms", ttft) | percentile_figures("tpot_ms", tpot)


def _transfers(records: Sequence[RequestRecord], change: Change | None) -> dict[str, float]:
    """The median transfer as the server timed it for each request, else as estimated from the histogram;
    nothing of the two without transfers."""
    figures: dict[str, float] = {}
    timed = [record.timing["transfer_ms"] for record in records if record.timing.get("transfer_ms")]
    if timed:
        figures["transfer_ms_p50"] = percentile(timed, 50)
    if change is None:
        return figures
    pulls = change.histogram("galley_kv_transfer_seconds", role="decode")
    if not timed and pulls.count:
        figures["transfer_ms_p50"] = 1e3 * pulls.quantile(0.5)
    return figures | {"transfer_bytes": change.total("galley_kv_transfer_bytes_total", role="decode")}


def _shown(failures: list[str]) -> tuple[str, ...]:
    more = len(failures) - SHOWN_FAILURES
    return tuple(failures[:SHOWN_FAILURES]) + ((f"and {more} more",) if more > 0 else ())


BENCH = Bench("40 streamed requests of mixed length: do they work, TTFT, TPOT, KV transfer", run, options)
