"""One trial of the gateway bench: a number of streams at a steady rate, and what came of them.

Knows nothing of how rates are chosen and of the command line.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from bench.fake.cluster import EchoCluster
from bench.stream_load import StreamRecord, completion_request, connect, finish

PROMPT = " the cook lifts a small iron pot from the stove and stirs salt into the warm water"
"""Every token of it, and of its repetition, is text of its own: one event per token."""
GRACE_S = 20.0
"""What a trial may take beyond its plan before its streams count as broken off."""
SETTLED_MS = 100.0
"""A gateway whose tokens are later than this at a trial's end does not keep up."""


@dataclass(frozen=True, slots=True)
class Trial:
    """`rate` is what arrived per s while all streams ran; `lag_ms` the median age of tokens near the end."""

    asked: float
    rate: float
    lag_ms: float
    gateway_share: float
    other_share: float
    problems: tuple[str, ...]

    @property
    def kept_up(self) -> bool:
        return not self.problems and self.rate >= 0.97 * self.asked and self.lag_ms <= SETTLED_MS


@dataclass(frozen=True, slots=True)
class Added:
    """What the gateway and the bus add, in ms: medians over the requests and tokens of one phase."""

    ttft_ms: float
    itl_ms: float
    problems: tuple[str, ...]


async def saturate(cluster: EchoCluster, model: str, streams: int, rate: float, seconds: float) -> Trial:
    """`streams` streams that begin together and get `rate` tokens/s between them for `seconds`."""
    step_s = streams / rate
    num_tokens = max(8, round(seconds / step_s))
    await cluster.set_pace(step_s)
    connections = await connect(cluster.url, streams)
    request = completion_request(cluster.url, model, PROMPT, num_tokens)
    usage = asyncio.create_task(_shares(cluster, seconds))
    for connection in connections:
        connection.send(request)
    records = await finish(connections, seconds * 2 + GRACE_S)
    shares = await usage
    emitted = await cluster.take_times()
    problems = check(records, num_tokens)
    if problems:
        return Trial(rate, 0.0, 0.0, *shares, problems)
    begun = max(record.times[0] for record in records)
    ended = min(record.times[-1] for record in records)
    inside = sum(begun < at <= ended for record in records for at in record.times)
    late = ended - (ended - begun) / 4
    ages = [age for record in records for at, age in _ages(record, emitted) if late <= at <= ended]
    lag_ms = 1e3 * median(ages) if ages else 1e9
    return Trial(rate, inside / max(ended - begun, 1e-9), lag_ms, *shares, ())


async def delays(cluster: EchoCluster, model: str, streams: int, rate: float, seconds: float) -> Added:
    """`streams` streams at any time, one ending and one beginning in turn, `rate` tokens/s between them.

    The first round fills the slots; the second one is measured, in the steady state. All connections are
    open before, as those of a client's pool are.
    """
    step_s = streams / rate
    num_tokens = max(8, round(seconds / step_s))
    await cluster.set_pace(step_s)
    request = completion_request(cluster.url, model, PROMPT, num_tokens)
    connections = await connect(cluster.url, 2 * streams)
    begun = time.time()
    for number, connection in enumerate(connections):
        await asyncio.sleep(begun + number * seconds / streams - time.time())
        connection.send(request)
    await finish(connections[:streams], GRACE_S)
    records = await finish(connections[streams:], 2 * seconds + GRACE_S)
    emitted = await cluster.take_times()
    if problems := check(records, num_tokens):
        return Added(0.0, 0.0, problems)
    steady = max(record.sent for record in records)
    ages = [age for record in records for at, age in _ages(record, emitted)[1:] if at < steady]
    return Added(1e3 * median(_added_ttft(record, emitted) for record in records), 1e3 * median(ages), ())


def check(records: Sequence[StreamRecord], num_tokens: int) -> tuple[str, ...]:
    """What is wrong with streams that should each be `num_tokens` events and the prompt's repetition."""
    problems = []
    for record in records:
        expected = PROMPT * (len(record.text) // len(PROMPT) + 1)
        if record.error:
            problems.append(record.error)
        elif len(record.times) != num_tokens:
            problems.append(f"{len(record.times)} of {num_tokens} events came")
        elif not expected.startswith(record.text):
            problems.append(f"the text is wrong: {record.text[:80]!r}")
    return tuple(problems[:3])


def _ages(record: StreamRecord, emitted: dict[str, list[float]]) -> list[tuple[float, float]]:
    """(when it came, how long after its emission) of each token."""
    tokens = emitted.get(record.request, [])[1:]
    return [(came, came - sent) for came, sent in zip(record.times, tokens, strict=False)]


def _added_ttft(record: StreamRecord, emitted: dict[str, list[float]]) -> float:
    """Time to the first token without what the worker had of it: from the job's coming to the emission."""
    came, first, *_ = emitted[record.request]
    return (record.times[0] - record.sent) - (first - came)


async def _shares(cluster: EchoCluster, seconds: float) -> tuple[float, float]:
    """CPU of the gateway and of all others, as shares of a core, over the middle of a trial."""
    await asyncio.sleep(0.3 * seconds)
    begun, gateway, other = time.monotonic(), cluster.gateway_cpu(), cluster.other_cpu()
    await asyncio.sleep(0.6 * seconds)
    wall = time.monotonic() - begun
    return (cluster.gateway_cpu() - gateway) / wall, (cluster.other_cpu() - other) / wall
