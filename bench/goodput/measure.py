"""Measurements on one contestant: what it takes unloaded, and a trial at one rate.

Knows nothing of what is measured next and why.
"""

import random
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from bench.engine.rivals import shared_step_s
from bench.frame import Frame
from bench.goodput.fleet import CoreMeter, Running
from bench.goodput.load import OpenLoop
from bench.goodput.slo import Slo, Unloaded
from bench.goodput.trial import Jury, Trial
from bench.goodput.workload import Workload
from bench.progress import Advance
from bench.records import RequestRecord
from bench.workloads import RequestSpec, token_ids

UNLOADED_REQUESTS = 6
ROUNDS = 3
BATCH = 8
BATCH_OUTPUT = 64
GIVEN_UP = 1.5
"""A request is cut off after this many times what the loosest SLO allows it in all."""
PATIENT_S = 120.0
"""The same where no SLO is known yet."""


class RequestsFailed(Exception):
    """What must not fail did: there is nothing to measure."""


async def warm_up(member: Running, workload: Workload) -> None:
    """A few requests at once, one after another on each server. Raises RequestsFailed."""
    shapes = workload.load(4, 0).shapes
    specs = [RequestSpec(shape.prompt(_nonce()), min(shape.output_tokens, 16)) for shape in shapes]
    for _ in member.endpoints:
        await _ask(member, specs)


async def unloaded(member: Running, workload: Workload, frame: Frame) -> Unloaded:
    """TTFT of the workload's prompts one at a time, and the step of eight streams. Raises RequestsFailed.

    TTFT is the mean of the workload's first six requests, each the median of three with fresh contents. The
    step is that of eight streams whose context, while it is timed, is on average the workload's (prompt and
    half the output); the median of three rounds.
    """
    shapes = workload.load(UNLOADED_REQUESTS, 0).shapes
    with frame.progress("unloaded", ROUNDS * (len(shapes) + 1), still=True) as done:
        ttfts = [
            median([await _ttft(member, RequestSpec(shape.prompt(_nonce()), 1), done) for _ in range(ROUNDS)])
            for shape in shapes
        ]
        prompt, output = workload.means()
        context = max(1, round(prompt + output / 2 - BATCH_OUTPUT / 2))
        steps = [await _step(member, workload, context, done) for _ in range(ROUNDS)]
    return Unloaded(fmean(ttfts), median(steps))


async def _ttft(member: Running, spec: RequestSpec, done: Advance) -> float:
    [record] = await _ask(member, [spec])
    done(record)
    if record.ttft_s is None:
        raise RequestsFailed(f"{member.name}: no token came")
    return record.ttft_s


async def _step(member: Running, workload: Workload, prompt_tokens: int, done: Advance) -> float:
    rng = random.Random(_nonce())
    specs = [RequestSpec(token_ids(rng, prompt_tokens, workload.ids), BATCH_OUTPUT) for _ in range(BATCH)]
    records = await _ask(member, specs)
    done(records)
    try:
        return shared_step_s(records)
    except ValueError as error:
        raise RequestsFailed(f"{member.name}: {error}") from error


async def _ask(member: Running, specs: Sequence[RequestSpec]) -> list[RequestRecord]:
    """All at once."""
    loop = OpenLoop(member.endpoints, specs, Jury([], len(specs)), lambda _: PATIENT_S)
    records = await loop.run([0.0] * len(specs))
    for record in records:
        if record.error:
            raise RequestsFailed(f"{member.name}: {record.error}")
    return records


@dataclass(frozen=True, slots=True)
class Order:
    """What to try: `asked` requests of `workload` at `rate`. `loosest` bounds how long one is waited for."""

    workload: Workload
    rung: int
    rate: float
    asked: int
    loosest: Slo
    cores: tuple[int, ...]


async def try_rate(member: Running, order: Order, jury: Jury, frame: Frame) -> Trial:
    """Send it, and wait for the end of what was sent."""
    load = order.workload.load(order.asked, 0)
    with frame.progress(f"{member.name} at {order.rate:.3g}/s", order.asked, still=True) as done:
        loop = OpenLoop(
            member.endpoints,
            load.specs(_nonce()),
            _Shown(jury, done),
            lambda spec: GIVEN_UP * order.loosest.hopeless_after(spec.max_tokens),
        )
        meter = CoreMeter(member, order.cores)
        records = await loop.run(load.arrivals(order.rate))
        shares = meter.shares()
    seconds = max(record.ended for record in records)
    return Trial(member.name, order.rung, order.rate, order.asked, tuple(records), seconds, shares)


@dataclass(frozen=True, slots=True)
class _Shown:
    """A jury whose progress is shown."""

    jury: Jury
    done: Advance

    def ended(self, record: RequestRecord) -> None:
        self.jury.ended(record)
        self.done(record)

    def hopeless(self, running: Iterable[tuple[float, int]]) -> bool:
        return self.jury.hopeless(running)


def _nonce() -> str:
    return secrets.token_hex(8)
