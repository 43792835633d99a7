"""Counts what engines, exporters and KV pools do into a worker's metrics. Knows nothing of requests."""

from common.engine.runner import BatchPlan
from common.engine.scheduler import Scheduler
from common.engine.sequence import Sequence
from common.kv.pool.base import PoolEvent
from common.observability.metrics import WorkerMetrics


class StepMeter:
    """`count` once per executed plan, `admitted` once per sequence that was given its first blocks."""

    def __init__(self, metrics: WorkerMetrics, scheduler: Scheduler) -> None:
        self._metrics = metrics
        self._scheduler = scheduler
        self._preemptions = 0
        self._recomputed = 0

    def admitted(self, seq: Sequence) -> None:
        if seq.sampling.prompt_logprobs is None:  # else the cache was passed by
            self._metrics.prefix_cache_query_tokens.inc(len(seq.tokens))
            self._metrics.prefix_cache_hit_tokens.inc(seq.num_cached)

    def count(self, plan: BatchPlan) -> None:
        metrics, scheduler = self._metrics, self._scheduler
        metrics.prompt_tokens_computed.inc(sum(row.num_prompt_tokens for row in plan.rows))
        metrics.generated_tokens.inc(sum(row.sample for row in plan.rows))
        metrics.preemptions.inc(scheduler.num_preemptions - self._preemptions)
        metrics.recomputed_tokens.inc(scheduler.num_recomputed_tokens - self._recomputed)
        self._preemptions = scheduler.num_preemptions
        self._recomputed = scheduler.num_recomputed_tokens


class ExportMeter:
    """Counts what a KVExporter does (its ExportMetrics)."""

    def __init__(self, metrics: WorkerMetrics) -> None:
        self._metrics = metrics

    def sent(self, num_bytes: int, transport: str) -> None:
        self._metrics.kv_transfer_bytes(transport).inc(num_bytes)

    def failed(self) -> None:
        self._metrics.kv_transfer_failures.inc()


class KVPoolMeter:
    """Counts what a KVPool does (its PoolMeter)."""

    def __init__(self, metrics: WorkerMetrics, block_bytes: int) -> None:
        self._metrics = metrics
        self._block_bytes = block_bytes

    def count(self, event: PoolEvent, blocks: int) -> None:
        self._metrics.pool_blocks(event).inc(blocks)
        if event in ("hit", "published"):
            direction = "loaded" if event == "hit" else event
            self._metrics.pool_bytes(direction).inc(blocks * self._block_bytes)

    def unavailable(self) -> None:
        self._metrics.pool_unavailable.inc()
