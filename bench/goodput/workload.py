"""What users ask for: the named workloads, and replayed traces, as lengths, gaps and prompts.

Lengths and gaps depend on the seed alone, so every topology meets the same ones at every rate; contents are
fresh for each trial, so nothing is remembered from the last one. Knows nothing of servers.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from statistics import fmean

from bench.traces import Trace, read_trace
from bench.workloads import (
    TOKEN_IDS,
    Lengths,
    RequestSpec,
    fixed,
    gamma_arrivals,
    lognormal_of_mean,
    token_ids,
)

TRACE = "trace"


@dataclass(frozen=True, slots=True)
class Shape:
    """One request's lengths in tokens, and the tokens of its prompt for a nonce."""

    prompt_tokens: int
    output_tokens: int
    prompt: Callable[[str], tuple[int, ...]]

    def spec(self, nonce: str) -> RequestSpec:
        return RequestSpec(self.prompt(nonce), self.output_tokens)


@dataclass(frozen=True, slots=True)
class Load:
    """`shapes` in order of arrival; `gaps` are s before each of them at a mean rate of one a second."""

    shapes: tuple[Shape, ...]
    gaps: tuple[float, ...]

    def arrivals(self, rate: float) -> list[float]:
        """s from the start at which each request is due at `rate` requests/s."""
        times, at = [], 0.0
        for gap in self.gaps:
            at += gap / rate
            times.append(at)
        return times

    def specs(self, nonce: str) -> list[RequestSpec]:
        return [shape.spec(f"{nonce}/{number}") for number, shape in enumerate(self.shapes)]


@dataclass(frozen=True, slots=True)
class Workload:
    """`load(count, seed)` draws requests; `about` says in a line what they are. Prompts are made of `ids`."""

    name: str
    about: str
    load: Callable[[int, int], Load]
    ids: tuple[int, int] = TOKEN_IDS

    def means(self) -> tuple[float, float]:
        """Mean prompt and output tokens, of a thousand requests."""
        shapes = self.load(1000, 0).shapes
        return fmean(shape.prompt_tokens for shape in shapes), fmean(shape.output_tokens for shape in shapes)


@dataclass(frozen=True, slots=True)
class Mix:
    """Two length distributions."""

    about: str
    prompt: Lengths
    output: Lengths


MIXES = {
    "chat": Mix("200 tokens in, 150 out", fixed(200), fixed(150)),
    "long-prompt": Mix("512 tokens in, 64 out", fixed(512), fixed(64)),
    "very-long-prompt": Mix("2,048 tokens in, 64 out", fixed(2048), fixed(64)),
    "thinking": Mix("64 tokens in, 1,000 out", fixed(64), fixed(1000)),
    "sharegpt": Mix(
        "as ShareGPT in the DistServe paper: 755.5 tokens in and 200.3 out on average, long tails",
        lognormal_of_mean(755.5, 1.1, 4, 4096),
        lognormal_of_mean(200.3, 0.9, 2, 1024),
    ),
    "humaneval": Mix(
        "as HumanEval in the DistServe paper: 171.3 tokens in and 98.2 out on average",
        lognormal_of_mean(171.3, 0.4, 32, 512),
        lognormal_of_mean(98.2, 0.6, 8, 512),
    ),
    "longbench": Mix(
        "as LongBench in the DistServe paper: 1,738.3 tokens in and 90.7 out on average",
        lognormal_of_mean(1738.3, 0.5, 256, 4096),
        lognormal_of_mean(90.7, 0.6, 8, 512),
    ),
}
"""The paper gives means; the spread is ours: log-normal, as lengths of most requests are, cut off."""


def named(name: str, cv: float) -> Workload:
    """One of MIXES, with gaps of coefficient of variation `cv`. Raises KeyError for another name."""
    mix = MIXES[name]

    def load(count: int, seed: int) -> Load:
        rng = random.Random(f"{seed}/lengths")
        shapes = tuple(_shape(mix.prompt(rng), mix.output(rng)) for _ in range(count))
        return Load(shapes, unit_gaps(gamma_arrivals(1.0, cv, count, seed=seed)))

    return Workload(name, mix.about, load)


def replayed(path: Path, length: Fraction) -> Workload:
    """The trace in `path`, lengths times `length`, faster or slower as the rate asks. Raises ConfigError.

    Seed s begins after s times as many requests; the first one's prefixes are known to nobody.
    """
    trace = read_trace(path).scaled(length=length)

    def load(count: int, seed: int) -> Load:
        part = trace.part(seed * count, count)
        times = [request.at_s + 1 / trace.rate for request in part.requests]
        return Load(tuple(_recorded(part, number) for number in range(count)), unit_gaps(times))

    about = f"replay of {path.name}, lengths x {length}; recorded at {trace.rate:.3g} requests/s"
    return Workload(TRACE, about, load)


def unit_gaps(arrivals: Sequence[float]) -> tuple[float, ...]:
    """Gaps of ascending `arrivals` with a mean of exactly one second: the rate asked for is the rate sent."""
    scale = len(arrivals) / arrivals[-1]
    return tuple((after - before) * scale for before, after in zip((0.0, *arrivals), arrivals, strict=False))


def _shape(prompt_tokens: int, output_tokens: int) -> Shape:
    return Shape(prompt_tokens, output_tokens, lambda nonce: token_ids(random.Random(nonce), prompt_tokens))


def _recorded(part: Trace, number: int) -> Shape:
    """A request of a trace: its blocks are the same for all requests of a trial, not beyond it."""
    request = part.requests[number]
    return Shape(
        request.prompt_tokens,
        request.output_tokens,
        lambda nonce: part.prompt(request, nonce.partition("/")[0]),
    )
