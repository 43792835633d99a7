"""What meters make of what they are told."""

from common.observability.metrics import WorkerMetrics
from common.runtime.meters import KVPoolMeter
from tests.unit.observability.test_metrics import value


def test_a_pool_is_counted_in_blocks_and_bytes() -> None:
    metrics = WorkerMetrics("prefill-0", "prefill")
    meter = KVPoolMeter(metrics, block_bytes=1000)
    meter.count("hit", 3)
    meter.count("published", 2)
    meter.count("miss", 5)
    meter.unavailable()
    assert value(metrics, "galley_pool_blocks_total", event="hit") == 3
    assert value(metrics, "galley_pool_blocks_total", event="miss") == 5
    assert value(metrics, "galley_pool_blocks_total", event="corrupt") == 0
    assert value(metrics, "galley_pool_bytes_total", direction="loaded") == 3000
    assert value(metrics, "galley_pool_bytes_total", direction="published") == 2000
    assert value(metrics, "galley_pool_unavailable_total") == 1
