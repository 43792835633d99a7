"""What a cached prefix saves: time to the first token when the prompt's beginning is known, and when not.

Rounds of two requests, one at a time: 1,500 random tokens that nobody has seen and 20 of its own (a miss),
then the same 1,500 and 20 others (a hit). 16 tokens out, greedy; medians over the rounds, TTFT is the
client's. A first round warms the server up and is not counted.
"""

import argparse
import random
import secrets
from collections.abc import Sequence
from typing import get_args

from bench.client import closed_loop, open_client
from bench.frame import Bench, Frame
from bench.records import RequestRecord
from bench.report import Outcome
from bench.stats import percentile
from bench.workloads import RequestSpec, token_ids
from common.config import Topology
from deploy.local.spec import ClusterSpec

ROUNDS = 10
SHARED_TOKENS = 1500
OWN_TOKENS = 20
OUTPUT_TOKENS = 16
LEAST_CACHED = SHARED_TOKENS - 63
"""A cache of whole blocks cannot give the rest of the shared part; blocks are of 64 tokens at most."""


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--topology",
        choices=get_args(Topology),
        default="disaggregated",
        help="of a cluster of our own (default: %(default)s)",
    )
    parser.add_argument("--rounds", type=_positive, default=ROUNDS, help="default: %(default)s")


async def run(frame: Frame, arguments: argparse.Namespace) -> Outcome:
    # A server that is up already may have seen the prompts of seed 0.
    seed = 0 if frame.url is None else secrets.randbelow(2**31)
    specs = rounds_of_prompts(arguments.rounds + 1, seed)
    async with (
        frame.target(ClusterSpec(topology=arguments.topology)) as target,
        open_client(target.url) as client,
    ):
        frame.note(
            f"{arguments.rounds} misses and hits of {SHARED_TOKENS} + {OWN_TOKENS} tokens to {client.model}"
            f" at {target.url}, seed {seed}"
        )
        await closed_loop(client, specs[:2], 1)
        with frame.progress("requests", len(specs) - 2) as done:
            records = await closed_loop(client, specs[2:], 1, done)
    return Outcome(figures(records), tuple(problems(records)))


def rounds_of_prompts(count: int, seed: int) -> list[RequestSpec]:
    """Miss and hit of each round in turn."""
    specs = []
    for number in range(count):
        rng = random.Random(f"{seed}/{number}")
        shared = token_ids(rng, SHARED_TOKENS)
        specs += [RequestSpec(shared + token_ids(rng, OWN_TOKENS), OUTPUT_TOKENS) for _ in range(2)]
    return specs


def figures(records: Sequence[RequestRecord]) -> dict[str, float]:
    """Of misses and hits in turn; nothing without a good one of each."""
    misses, hits = records[::2], records[1::2]
    miss_ms, hit_ms = _median_ttft_ms(misses), _median_ttft_ms(hits)
    if miss_ms is None or hit_ms is None:
        return {}
    cached = [record.cached_tokens for record in hits if record.cached_tokens is not None]
    known = {"hit_cached_tokens": percentile(cached, 50)} if cached else {}
    return {"ttft_miss_ms": miss_ms, "ttft_hit_ms": hit_ms, "ttft_miss_over_hit": miss_ms / hit_ms, **known}


def _median_ttft_ms(records: Sequence[RequestRecord]) -> float | None:
    times = [1e3 * record.ttft_s for record in records if record.ok and record.ttft_s is not None]
    return percentile(times, 50) if times else None


def problems(records: Sequence[RequestRecord]) -> list[str]:
    """One line for each request that failed, and for each that was not the miss or hit it should be."""
    lines = []
    for number, record in enumerate(records):
        kind, least, most = ("hit", LEAST_CACHED, SHARED_TOKENS) if number % 2 else ("miss", 0, 0)
        if record.error or record.output_tokens != OUTPUT_TOKENS:
            lines.append(f"{kind} {number // 2}: {record.error or f'{record.output_tokens} tokens came'}")
        elif record.cached_tokens is not None and not least <= record.cached_tokens <= most:
            lines.append(f"{kind} {number // 2}: {record.cached_tokens} tokens were cached")
    return lines


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


BENCH = Bench("a prompt whose first 1,500 tokens are cached against one that is new: TTFT", run, options)
