"""Counters and histograms as our own services expose them, read back and compared."""

import httpx
import pytest

from bench.scrape import Change, Histogram, Snapshot, change_between, scrape
from common.observability.metrics import WorkerMetrics

SECONDS = "galley_kv_transfer_seconds"
BYTES = "galley_kv_transfer_bytes_total"


def worker(instance: str, pulls: list[float], num_bytes: int) -> WorkerMetrics:
    metrics = WorkerMetrics(instance, "decode")
    metrics.kv_transfer_bytes("sm").inc(num_bytes)
    for seconds in pulls:
        metrics.kv_transfer_seconds.observe(seconds)
    return metrics


def snapshot(*metrics: WorkerMetrics) -> Snapshot:
    return Snapshot([each.exposition().decode() for each in metrics])


def test_counters_add_up_over_instances_and_labels_select() -> None:
    prefill = WorkerMetrics("prefill-0", "prefill")
    prefill.kv_transfer_bytes("sm").inc(999)
    both = snapshot(worker("d0", [], 10), worker("d1", [], 32), prefill)
    assert both.total(BYTES, role="decode") == 42
    assert both.total(BYTES, role="decode", instance="d1") == 32
    assert both.total("galley_nothing_total") == 0


def test_a_change_counts_only_what_happened_in_between() -> None:
    metrics = worker("d0", [5.0] * 100, 1000)
    before = snapshot(metrics)
    metrics.kv_transfer_bytes("tcp").inc(24)
    for _ in range(4):
        metrics.kv_transfer_seconds.observe(0.015)
    change = Change(before, snapshot(metrics))
    assert change.total(BYTES) == 24
    assert change.histogram(SECONDS).count == 4
    assert 0.01 < change.histogram(SECONDS).quantile(0.5) <= 0.02


@pytest.mark.parametrize(
    ("q", "expected"),
    [(0.25, 0.5), (0.5, 1.0), (0.75, 1.5), (0.9, 1.8), (1.0, 2.0)],
)
def test_quantiles_are_linear_within_a_bucket_as_prometheus_has_them(q: float, expected: float) -> None:
    inf = float("inf")
    assert Histogram(((1.0, 50), (2.0, 100), (inf, 100))).quantile(q) == pytest.approx(expected)


def test_what_lies_beyond_the_last_bound_is_that_bound_and_nothing_has_no_quantile() -> None:
    inf = float("inf")
    assert Histogram(((1.0, 0), (2.0, 0), (inf, 3))).quantile(0.5) == 2.0
    with pytest.raises(ValueError):
        Histogram(((1.0, 0), (inf, 0))).quantile(0.5)
    with pytest.raises(ValueError):
        Histogram(()).quantile(0.5)


async def test_a_scrape_reads_every_worker_and_is_nothing_when_one_is_missing() -> None:
    texts = {"a": worker("a", [], 1).exposition(), "b": worker("b", [], 2).exposition()}

    def handle(request: httpx.Request) -> httpx.Response:
        text = texts.get(request.url.host)
        return httpx.Response(404) if text is None else httpx.Response(200, content=text)

    transport = httpx.MockTransport(handle)
    both = await scrape(["http://a", "http://b"], transport=transport)
    assert both is not None
    assert both.total(BYTES) == 3
    assert await scrape(["http://a", "http://c"], transport=transport) is None
    assert await scrape([]) is None
    assert change_between(both, None) is None
