"""What is asked of a server, and when: seeded prompts, lengths and arrival times.

The same seed gives the same requests on every machine. Knows nothing of HTTP and of who sends them.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

TOKEN_IDS = (1_000, 20_000)
"""Ids that are ordinary text in every vocabulary of 20,000 and more: special tokens sit at the ends."""

_WORDS = (
    "the a one two some every small large old young warm cold quiet bright slow quick round flat "
    "cook pot pan stove table spoon bread water salt fire ship crew rope deck sea wind storm harbour "
    "carries stirs lifts finds brings leaves watches turns fills opens closes keeps gives takes makes "
    "and then while before after because near under over with without into across again today never"
)


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """One streamed completion to ask for. `prompt` is text or token ids; with `ignore_eos` exactly
    `max_tokens` tokens come back."""

    prompt: str | tuple[int, ...]
    max_tokens: int
    ignore_eos: bool = True
    temperature: float = 0.0
    seed: int | None = None


Lengths = Callable[[random.Random], int]
"""Draws one length in tokens."""


def fixed(length: int) -> Lengths:
    return lambda _: length


def uniform(low: int, high: int) -> Lengths:
    """Every length from `low` to `high`, both included, equally often."""
    return lambda rng: rng.randint(low, high)


def lognormal(median: float, sigma: float, low: int, high: int) -> Lengths:
    """exp(N(ln median, sigma)), cut to `low`..`high`: the long tail of real prompts."""
    return lambda rng: min(max(round(median * rng.lognormvariate(0.0, sigma)), low), high)


def lognormal_of_mean(mean: float, sigma: float, low: int, high: int) -> Lengths:
    """`lognormal` with that median whose lengths, once cut to `low`..`high`, have the mean `mean`.

    Raises ValueError for a mean outside `low`..`high`.
    """
    if not low < mean < high:
        raise ValueError(f"no lengths from {low} to {high} have the mean {mean}")
    less, more = 1e-3 * low, 1e3 * high
    for _ in range(100):
        median = math.sqrt(less * more)
        if _mean_of_cut(median, sigma, low, high) < mean:
            less = median
        else:
            more = median
    return lognormal(math.sqrt(less * more), sigma, low, high)


def _mean_of_cut(median: float, sigma: float, low: int, high: int) -> float:
    """The mean of exp(N(ln median, sigma)), where what is less than `low` counts as `low`, and so above."""

    def below(bound: float, shift: float) -> float:
        z = (math.log(bound / median) - shift * sigma**2) / sigma
        return 0.5 * (1 + math.erf(z / math.sqrt(2)))

    inside = median * math.exp(sigma**2 / 2) * (below(high, 1) - below(low, 1))
    return low * below(low, 0) + inside + high * (1 - below(high, 0))


def mixed(*weighted: tuple[float, Lengths]) -> Lengths:
    """One of several distributions, drawn by weight for each length."""
    weights = [weight for weight, _ in weighted]
    return lambda rng: rng.choices(weighted, weights)[0][1](rng)


def text_of_words(rng: random.Random, length: int) -> str:
    """`length` everyday English words, about one token each; no two prompts share a beginning for long."""
    return " ".join(rng.choices(_WORDS.split(), k=length))


def token_ids(rng: random.Random, length: int, ids: tuple[int, int] = TOKEN_IDS) -> tuple[int, ...]:
    """Exactly `length` tokens from `ids` (first, last + 1)."""
    return tuple(rng.randrange(*ids) for _ in range(length))


Prompts = Callable[[random.Random, int], str | tuple[int, ...]]


def requests(
    count: int, prompt: Lengths, output: Lengths, *, seed: int, prompts: Prompts = token_ids
) -> list[RequestSpec]:
    """`count` requests with lengths from `prompt` and `output`, filled by `prompts`.

    Request i depends on `seed` and i alone, so a longer run begins with the shorter one's requests.
    """
    specs = []
    for index in range(count):
        rng = random.Random(f"{seed}/{index}")
        specs.append(RequestSpec(prompts(rng, prompt(rng)), output(rng)))
    return specs


def poisson_arrivals(rate: float, count: int, *, seed: int) -> list[float]:
    """Arrival times in s from 0 of a Poisson process with `rate` requests a second."""
    return gamma_arrivals(rate, 1.0, count, seed=seed)


def gamma_arrivals(rate: float, cv: float, count: int, *, seed: int) -> list[float]:
    """Arrival times in s from 0 with Gamma-distributed gaps of mean 1/rate.

    `cv` is the gaps' coefficient of variation: 1 is Poisson, more is burstier, less is more regular.
    Raises ValueError unless rate and cv are positive.
    """
    if rate <= 0 or cv <= 0:
        raise ValueError("rate and cv must be above 0")
    rng = random.Random(f"{seed}/arrivals")
    shape = 1 / cv**2
    return list(accumulate(rng.gammavariate(shape, 1 / (shape * rate)) for _ in range(count)))
