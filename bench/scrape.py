"""What the services count: their `/metrics`, read before and after a load and compared.

A snapshot sums over the instances scraped, which is right for counters and histograms. Knows nothing of
which service counts what.
"""

import asyncio
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families

SCRAPE_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Histogram:
    """Cumulative counts: `buckets` are (upper bound, number of observations at or below it), ascending."""

    buckets: tuple[tuple[float, float], ...]

    @property
    def count(self) -> float:
        return self.buckets[-1][1] if self.buckets else 0.0

    def quantile(self, q: float) -> float:
        """An estimate of the `q`-quantile (0 to 1): linear within its bucket, as Prometheus'
        `histogram_quantile` does it; the last finite bound if it lies beyond that.

        Raises ValueError without observations.
        """
        if not self.count:
            raise ValueError("there is no quantile of no observations")
        rank, low, below = q * self.count, 0.0, 0.0
        for high, upto in self.buckets:
            if upto >= rank and upto > below:
                return low if math.isinf(high) else low + (high - low) * (rank - below) / (upto - below)
            low, below = high, upto
        return low


class Snapshot:
    """The samples of one or more expositions."""

    def __init__(self, expositions: Iterable[str]) -> None:
        self._samples: list[tuple[str, Mapping[str, str], float]] = [
            (sample.name, sample.labels, sample.value)
            for text in expositions
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        ]

    def total(self, name: str, **labels: str) -> float:
        """The sum of all samples called `name` that carry `labels`; 0 if there are none."""
        return math.fsum(value for _, value in self._matching(name, labels))

    def histogram(self, name: str, **labels: str) -> Histogram:
        """The histogram family `name`, summed over all series that carry `labels`."""
        buckets: dict[float, float] = {}
        for sample, value in self._matching(f"{name}_bucket", labels):
            bound = float(sample["le"])
            buckets[bound] = buckets.get(bound, 0.0) + value
        return Histogram(tuple(sorted(buckets.items())))

    def _matching(self, name: str, labels: Mapping[str, str]) -> list[tuple[Mapping[str, str], float]]:
        return [
            (carried, value)
            for sample, carried, value in self._samples
            if sample == name and labels.items() <= carried.items()
        ]


@dataclass(frozen=True, slots=True)
class Change:
    """What happened between two snapshots of the same instances."""

    before: Snapshot
    after: Snapshot

    def total(self, name: str, **labels: str) -> float:
        return self.after.total(name, **labels) - self.before.total(name, **labels)

    def histogram(self, name: str, **labels: str) -> Histogram:
        """Only what was observed in between."""
        earlier = dict(self.before.histogram(name, **labels).buckets)
        later = self.after.histogram(name, **labels).buckets
        return Histogram(tuple((bound, count - earlier.get(bound, 0.0)) for bound, count in later))


async def scrape(
    urls: Sequence[str], *, transport: httpx.AsyncBaseTransport | None = None
) -> Snapshot | None:
    """`/metrics` of every service in `urls`, or None: without services, and when one of them does not
    answer, because a sum that lacks an instance is a wrong number."""
    if not urls:
        return None
    async with httpx.AsyncClient(timeout=SCRAPE_TIMEOUT_S, transport=transport, trust_env=False) as http:
        try:
            responses = await asyncio.gather(*(http.get(f"{url}/metrics") for url in urls))
            return Snapshot([response.raise_for_status().text for response in responses])
        except httpx.HTTPError:
            return None


def change_between(before: Snapshot | None, after: Snapshot | None) -> Change | None:
    """What happened in between, when both could be had."""
    return None if before is None or after is None else Change(before, after)
