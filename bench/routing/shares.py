"""What became of a load: how it was shared out, and how much of it was found cached. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from bench.records import RequestRecord
from bench.scrape import Change
from bench.stats import percentile


@dataclass(frozen=True, slots=True)
class Shares:
    """Requests per worker, the share of prompt tokens whose KV was there, TTFTs as the client saw them."""

    requests: tuple[int, ...]
    hit_share: float
    ttft_s: tuple[float, ...]

    @property
    def max_over_mean(self) -> float:
        return max(self.requests) * len(self.requests) / max(1, sum(self.requests))

    @property
    def starved(self) -> int:
        """Workers that got nothing."""
        return sum(not count for count in self.requests)

    def ttft_ms(self, percent: float) -> float:
        return 1e3 * percentile(list(self.ttft_s), percent) if self.ttft_s else 0.0


def shares_of(changes: Sequence[Change], records: Sequence[RequestRecord]) -> Shares:
    """`changes` has one for each worker."""
    asked = sum(change.total("galley_prefix_cache_query_tokens_total") for change in changes)
    found = sum(change.total("galley_prefix_cache_hit_tokens_total") for change in changes)
    return Shares(
        tuple(round(change.total("galley_requests_total", status="ok")) for change in changes),
        found / max(1.0, asked),
        tuple(record.ttft_s for record in records if record.ok and record.ttft_s is not None),
    )


def figures(steady: dict[str, Shares], burst: Shares) -> dict[str, float]:
    """The first policy's plain and each one's with its name; `burst` was for two routers."""
    found: dict[str, float] = {}
    for number, (policy, shares) in enumerate(steady.items()):
        its = {
            "max_over_mean": shares.max_over_mean,
            "starved_workers": shares.starved,
            "hit_share": shares.hit_share,
            "ttft_ms_p50": shares.ttft_ms(50),
            "ttft_ms_p90": shares.ttft_ms(90),
        }
        found |= its if number == 0 else {}
        found |= {f"{name}_{policy}": value for name, value in its.items()}
    return found | {
        "max_over_mean_two_routers": burst.max_over_mean,
        "starved_workers_two_routers": burst.starved,
    }


def problems(what: str, records: Sequence[RequestRecord], output_tokens: int) -> list[str]:
    """One line for each request that failed or came back short."""
    return [
        f"{what}: request {number}: {record.error or f'{record.output_tokens} tokens came'}"
        for number, record in enumerate(records)
        if record.error or record.output_tokens != output_tokens
    ]
