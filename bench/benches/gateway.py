"""How many tokens a second one gateway process streams on one core, and what it adds to each.

256 streams, one event per token, eight unsynchronised workers that echo; the gateway tokenizes and
detokenizes with the model's own tokenizer. The rate is raised until it no longer keeps up. Client,
workers, router and NATS share the other core: where they need more than 90 % of it, the figure says more of
them than of the gateway, and is void. The added times are medians at 2,000 tokens/s: of a token, the time
from the worker's emission to the client; of the first one, what the request's way to the worker took besides.
With `--url` the load alone is sent to another front end, whose back end sets the pace.
"""

import argparse
import asyncio
import os

from bench.arguments import positive_number
from bench.client import open_client
from bench.fake.cluster import EchoCluster, echo_cluster
from bench.frame import Bench, Frame
from bench.gateway_trial import PROMPT, Trial, delays, saturate
from bench.report import Outcome
from bench.stream_load import completion_request, connect, finish

STREAMS = 256
WORKERS = 8
MAX_NUM_SEQS = 512
FIRST_RATE = 4000.0
FACTOR = 1.3
REFINEMENTS = 2
TRIAL_S = 5.0
FULL_SHARE = 0.9
"""Of the gateway's core: nothing more is to be had of it."""
VOID_SHARE = 0.9
DELAY_RATE = 2000.0
DELAY_S = 10.0
OPEN_STREAMS = 1000
PEER_TOKENS = 200


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rate", type=positive_number, help="one trial at so many tokens/s, not the search")
    parser.add_argument("--seconds", type=positive_number, default=TRIAL_S, help="length of a trial")


async def run(frame: Frame, arguments: argparse.Namespace) -> Outcome:
    if frame.url is not None:
        return await _peer(frame.url)
    frame.note(f"load of the machine before: {os.getloadavg()[0]:.2f}")
    async with (
        echo_cluster(frame, workers=WORKERS, max_num_seqs=MAX_NUM_SEQS, step_ms=20.0) as cluster,
        open_client(cluster.url) as client,
    ):
        model = client.model
        await saturate(cluster, model, 16, 1000.0, 1.0)  # warm
        if arguments.rate is not None:
            best = await _trial(frame, cluster, model, arguments.rate, arguments.seconds)
            return Outcome(_figures(best), _problems(best))
        bytes_per_stream = await _memory(cluster, model)
        best = await _search(frame, cluster, model, arguments.seconds)
        added = await delays(cluster, model, STREAMS, DELAY_RATE, DELAY_S)
    frame.note(f"load of the machine after: {os.getloadavg()[0]:.2f}")
    figures = _figures(best) | {
        "added_ttft_ms": added.ttft_ms,
        "added_itl_ms": added.itl_ms,
        "bytes_per_stream": bytes_per_stream,
    }
    return Outcome(figures, (*_problems(best), *added.problems))


async def _search(frame: Frame, cluster: EchoCluster, model: str, seconds: float) -> Trial:
    """The best trial that kept up: upwards by FACTOR, then by halves between the last two."""
    best = await _trial(frame, cluster, model, FIRST_RATE, seconds)
    while best.kept_up:
        trial = await _trial(frame, cluster, model, best.asked * FACTOR, seconds)
        if not trial.kept_up:
            break
        best = trial
    low, high = best.asked, best.asked * FACTOR
    for _ in range(REFINEMENTS if best.kept_up else 0):
        trial = await _trial(frame, cluster, model, (low + high) / 2, seconds)
        if trial.kept_up:
            best, low = trial, trial.asked
        else:
            high = trial.asked
    return best


async def _trial(frame: Frame, cluster: EchoCluster, model: str, rate: float, seconds: float) -> Trial:
    """A trial that fails with the core not full met something else on the machine, and is made once more."""
    trial = await _tell(frame, cluster, model, rate, seconds)
    if trial.kept_up or trial.gateway_share >= FULL_SHARE:
        return trial
    return await _tell(frame, cluster, model, rate, seconds)


async def _tell(frame: Frame, cluster: EchoCluster, model: str, rate: float, seconds: float) -> Trial:
    trial = await saturate(cluster, model, STREAMS, rate, seconds)
    frame.note(
        f"{rate:8,.0f} tokens/s asked: {trial.rate:8,.0f} came, {trial.lag_ms:7.1f} ms late, gateway "
        f"{trial.gateway_share:4.0%} of its core, client + workers + router + NATS {trial.other_share:4.0%} "
        f"of theirs: {'kept up' if trial.kept_up else 'did not keep up'} {'; '.join(trial.problems)}"
    )
    return trial


def _figures(trial: Trial) -> dict[str, float]:
    return {
        "streamed_tokens_per_s": trial.rate,
        "gateway_core_share": trial.gateway_share,
        "other_core_share": trial.other_share,
    }


def _problems(trial: Trial) -> tuple[str, ...]:
    problems = trial.problems
    if not trial.kept_up and not problems:
        problems = (f"{trial.asked:,.0f} tokens/s were too many",)
    if trial.other_share > VOID_SHARE:
        problems = (*problems, f"void: the load itself took {trial.other_share:.0%} of its core")
    return problems


async def _memory(cluster: EchoCluster, model: str) -> float:
    """Bytes by which the gateway grows for each of OPEN_STREAMS streams that have begun."""
    await cluster.set_pace(0.5)
    before = cluster.gateway_bytes()
    connections = await connect(cluster.url, OPEN_STREAMS)
    for connection in connections:
        connection.send(completion_request(cluster.url, model, PROMPT, 4000))
        await asyncio.sleep(0.005)
    await asyncio.sleep(3.0)
    if sum(len(connection.pieces) > 1 for connection in connections) < OPEN_STREAMS:
        await asyncio.sleep(10.0)
    grown = cluster.gateway_bytes() - before
    for connection in connections:
        connection.close()
    await asyncio.sleep(2.0)
    await cluster.take_times()
    return grown / OPEN_STREAMS


async def _peer(url: str) -> Outcome:
    """The same streams to a front end of somebody else's, as fast as it goes."""
    async with open_client(url) as client:
        request = completion_request(url, client.model, PROMPT, PEER_TOKENS)
    connections = await connect(url, STREAMS)
    for connection in connections:
        connection.send(request)
    records = await finish(connections, 300.0)
    problems = tuple(record.error for record in records if record.error)[:3]
    times = sorted(at for record in records for at in record.times)
    if not times:
        return Outcome({"streamed_tokens_per_s": 0.0}, problems or ("no event came",))
    return Outcome({"streamed_tokens_per_s": len(times) / max(times[-1] - times[0], 1e-9)}, problems)


BENCH = Bench("what one gateway on one core streams, and what it adds to TTFT and ITL", run, options)
