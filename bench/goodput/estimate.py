"""Goodput from what was measured at several rates, and how far chance alone could have moved it.

Pure. Intervals are the bootstrap's (Efron 1979): requests are drawn again, with replacement, at every rate.
Knows nothing of SLOs: a request met its own or did not.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from bench.stats import percentile

RESAMPLES = 1000
LOW, HIGH = 5.0, 95.0
"""Percentiles of the resamples: the interval holds 90 % of them."""


@dataclass(frozen=True, slots=True)
class Point:
    """`met` of `sent` requests kept their SLO at `rate` requests/s. `missed_for_sure` is set where the trial
    was given up because the target could not be reached any more, whatever the share until then was."""

    rate: float
    met: int
    sent: int
    missed_for_sure: bool = False

    @property
    def attainment(self) -> float:
        return self.met / self.sent


@dataclass(frozen=True, slots=True)
class Estimate:
    """`bound` is "" for a value between two measured rates, "<=" where even the lowest rate missed and ">="
    where even the highest one met the target."""

    value: float
    bound: str = ""


def goodput(points: Sequence[Point], target: float) -> Estimate:
    """The rate at which attainment falls below `target`, on straight lines between the measured rates.

    The lowest rate that misses ends the search, whatever luck brought above. Raises ValueError for no points.
    """
    if not points:
        raise ValueError("there is no goodput without a measured rate")
    below: Point | None = None
    for point in sorted(points, key=lambda point: point.rate):
        if not point.missed_for_sure and point.attainment >= target - 1e-9:
            below = point
            continue
        if below is None:
            return Estimate(point.rate, "<=")
        fall = below.attainment - min(point.attainment, target)
        share = (below.attainment - target) / fall if fall > 0 else 0.0
        return Estimate(below.rate + share * (point.rate - below.rate))
    assert below is not None
    return Estimate(below.rate, ">=")


def resampled(points: Sequence[Point], target: float, *, seed: str, count: int = RESAMPLES) -> list[float]:
    """Goodputs of `count` bootstrap resamples of the requests at each rate."""
    rng = random.Random(seed)
    return [goodput([_again(point, rng) for point in points], target).value for _ in range(count)]


def _again(point: Point, rng: random.Random) -> Point:
    share = point.attainment
    met = sum(rng.random() < share for _ in range(point.sent))
    return Point(point.rate, met, point.sent)


@dataclass(frozen=True, slots=True)
class Ratio:
    """One goodput over another with its 90 % interval. `bound` says which way a bound of either moves it;
    "?" where both ways are open."""

    value: float
    low: float
    high: float
    bound: str = ""


def ratio(one: Estimate, other: Estimate, draws: Sequence[float], others: Sequence[float]) -> Ratio:
    """`one` over `other`; `draws` and `others` are their resamples, taken pair by pair."""
    ratios = [a / b for a, b in zip(draws, others, strict=True)]
    bounds = {one.bound, _turned(other.bound)} - {""}
    bound = bounds.pop() if len(bounds) == 1 else "?" if bounds else ""
    return Ratio(one.value / other.value, percentile(ratios, LOW), percentile(ratios, HIGH), bound)


def share_interval(met: int, sent: int, *, seed: str, count: int = RESAMPLES) -> tuple[float, float]:
    """The 90 % interval of an attainment."""
    rng = random.Random(seed)
    shares = [_again(Point(1.0, met, sent), rng).attainment for _ in range(count)]
    return percentile(shares, LOW), percentile(shares, HIGH)


def _turned(bound: str) -> str:
    return {"<=": ">=", ">=": "<=", "": ""}[bound]
