"""Figures from samples: percentiles with numpy's default definition, and means.

Nothing is trimmed, smoothed or rounded. Knows nothing of what the samples are.
"""

import math
from collections.abc import Iterable, Sequence


def percentile(samples: Iterable[float], q: float) -> float:
    """The `q`-th percentile (0 to 100) by linear interpolation between the two closest ranks.

    This is definition 7 of Hyndman and Fan, "Sample Quantiles in Statistical Packages" (1996), and the
    default of `numpy.percentile`. Raises ValueError without samples, with a NaN among them, or for a q
    outside 0 to 100: a figure made of nothing must not look like one.
    """
    ordered = sorted(samples)
    if not ordered:
        raise ValueError("there is no percentile of no samples")
    if not 0 <= q <= 100:
        raise ValueError(f"a percentile lies between 0 and 100, not at {q}")
    if any(math.isnan(sample) for sample in ordered):
        raise ValueError("a sample is not a number")
    rank = (len(ordered) - 1) * q / 100
    below = math.floor(rank)
    above = min(below + 1, len(ordered) - 1)
    low, high = ordered[below], ordered[above]
    return low if low == high else low + (high - low) * (rank - below)


def mean(samples: Sequence[float]) -> float:
    """The arithmetic mean. Raises ValueError without samples."""
    if not samples:
        raise ValueError("there is no mean of no samples")
    return math.fsum(samples) / len(samples)


def percentile_figures(name: str, samples: Sequence[float], qs: Iterable[int] = (50, 99)) -> dict[str, float]:
    """`{name}_p50`, `{name}_p99` and so on; nothing without samples, rather than an invented number."""
    return {f"{name}_p{q}": percentile(samples, q) for q in qs} if samples else {}
