"""The metric families of every service, in one registry per service. Names: design.md section 10.

Every series carries `instance` and `role`. An attribute has its family's name without `galley_` and
`_total`; a family with one more label is called with that label's value: `metrics.kv_blocks("used").set(3)`.
A gauge that mirrors live state is best bound once: `metrics.leases("reading").set_function(...)`.
Knows nothing of who counts what.
"""

from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from common.messages.cluster import Role
from common.observability.timeline import Stage

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 40.0, 60.0)
TPOT_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)
TRANSFER_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
"""All in seconds."""
POOL_EVENTS = ("matched", "unmatched", "hit", "miss", "published", "refused", "evicted", "corrupt")

M = TypeVar("M", Counter, Gauge, Histogram)


class Family(Generic[M]):
    """One metric name with one label of its own; called with the label's value, gives that series."""

    def __init__(self, series: Callable[[str], M], values: tuple[str, ...]) -> None:
        self._series: Callable[[str], M] = series
        for value in values:
            series(value)

    def __call__(self, value: str) -> M:
        return self._series(value)


class ServiceMetrics:
    """The registry of one service and the families that all services have."""

    def __init__(self, instance: str, role: Role) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # one more series per counter, read by nobody
        self.registry = CollectorRegistry(auto_describe=True)
        self._identity = (instance, role)
        self.control_connected = self._gauge("control_connected", "1 while the message bus is usable")
        self.messages_invalid = self._counter(
            "messages_invalid_total", "received payloads that made no sense"
        )

    def exposition(self) -> bytes:
        """All series in Prometheus' text format; served as CONTENT_TYPE."""
        return generate_latest(self.registry)

    def _gauge(self, name: str, about: str) -> Gauge:
        family = Gauge(f"galley_{name}", about, ("instance", "role"), registry=self.registry)
        return family.labels(*self._identity)

    def _counter(self, name: str, about: str) -> Counter:
        family = Counter(f"galley_{name}", about, ("instance", "role"), registry=self.registry)
        return family.labels(*self._identity)

    def _histogram(self, name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(
            f"galley_{name}", about, ("instance", "role"), registry=self.registry, buckets=buckets
        )
        return family.labels(*self._identity)

    def _gauges(self, name: str, about: str, label: str, *values: str) -> Family[Gauge]:
        """`values` exist, at 0, from the start."""
        family = Gauge(f"galley_{name}", about, ("instance", "role", label), registry=self.registry)
        return Family(lambda value: family.labels(*self._identity, value), values)

    def _counters(self, name: str, about: str, label: str, *values: str) -> Family[Counter]:
        family = Counter(f"galley_{name}", about, ("instance", "role", label), registry=self.registry)
        return Family(lambda value: family.labels(*self._identity, value), values)


class StagedMetrics(ServiceMetrics):
    """Where requests are. At the gateway the four stages add up to requests_in_flight."""

    def __init__(self, instance: str, role: Role) -> None:
        super().__init__(instance, role)
        self.requests = self._counters(
            "requests_total", "requests ended, by how", "status", "ok", "error", "aborted"
        )
        self.requests_in_flight = self._gauge("requests_in_flight", "requests not ended yet")
        self.requests_queued = self._gauge("requests_queued", "waiting for prefill to start")
        self.requests_prefilling = self._gauge("requests_prefilling", "prompt being computed")
        self.requests_waiting_for_kv = self._gauge("requests_waiting_for_kv", "waiting for KV to arrive")
        self.requests_decoding = self._gauge("requests_decoding", "tokens being generated")
        self.requests_aborted = self._counters("requests_aborted_total", "requests aborted, by why", "reason")

    def show_stages(self, count: Callable[[Stage], float]) -> None:
        """Let each stage's gauge show what `count` says at the time."""
        gauges: dict[Stage, Gauge] = {
            "queued": self.requests_queued,
            "prefilling": self.requests_prefilling,
            "waiting_for_kv": self.requests_waiting_for_kv,
            "decoding": self.requests_decoding,
        }
        for stage, gauge in gauges.items():
            gauge.set_function(partial(count, stage))


class WorkerMetrics(StagedMetrics):
    """Prefill and decode."""

    def __init__(self, instance: str, role: Role) -> None:
        super().__init__(instance, role)
        self.prompt_tokens_computed = self._counter(
            "prompt_tokens_computed_total", "prompt tokens computed here"
        )
        self.generated_tokens = self._counter("generated_tokens_total", "output tokens sampled here")
        self.recomputed_tokens = self._counter(
            "recomputed_tokens_total", "tokens computed again after preemption"
        )
        self.preemptions = self._counter("preemptions_total", "sequences that lost their blocks for another")
        self.prefix_cache_query_tokens = self._counter(
            "prefix_cache_query_tokens_total", "tokens of sequences for which the prefix cache was asked"
        )
        self.prefix_cache_hit_tokens = self._counter(
            "prefix_cache_hit_tokens_total", "those of them whose KV it had"
        )
        self.engine_mode = self._gauges("engine_mode", "1 for how steps are run now", "mode")
        self.kv_received_tokens = self._counter("kv_received_tokens_total", "tokens whose KV was pulled")
        self.kv_transfer_bytes = self._counters("kv_transfer_bytes_total", "KV bytes moved", "transport")
        self.kv_transfer_seconds = self._histogram(
            "kv_transfer_seconds", "from prefill's end until all KV is here", TRANSFER_BUCKETS
        )
        self.kv_transfer_failures = self._counter("kv_transfer_failures_total", "pulls that did not end well")
        self.kv_transfer_gbps = self._gauges("kv_transfer_gbps", "GB/s seen by the self-test", "transport")
        self.kv_blocks = self._gauges("kv_blocks", "KV blocks, by state", "state", "free", "used", "cached")
        self.kv_blocks_quarantined = self._gauge(
            "kv_blocks_quarantined", "used, but only until a receive ended"
        )
        self.pool_blocks = self._counters(
            "pool_blocks_total", "KV blocks by what the KV pool did with them", "event", *POOL_EVENTS
        )
        self.pool_bytes = self._counters(
            "pool_bytes_total", "KV bytes from and to the KV pool", "direction", "loaded", "published"
        )
        self.pool_unavailable = self._counter(
            "pool_unavailable_total", "calls of the KV pool that failed or had no answer in time"
        )
        self.pool_unpublished = self._counter(
            "pool_unpublished_blocks_total", "computed blocks that did not get into the KV pool"
        )
        self.pool_usable = self._gauges(
            "pool_usable", "1 while the KV pool is asked, 0 while it is left alone after a failure", "pool"
        )
        self.leases = self._gauges(
            "leases", "leases held for readers, by state", "state", "waiting", "reading", "ending"
        )


class GatewayMetrics(StagedMetrics):
    def __init__(self, instance: str, role: Role = "gateway") -> None:
        super().__init__(instance, role)
        self.ttft_seconds = self._histogram("ttft_seconds", "arrival to first token, in s", TTFT_BUCKETS)
        self.tpot_seconds = self._histogram(
            "tpot_seconds", "mean per token after the first, in s", TPOT_BUCKETS
        )
        self.itl_seconds = self._histogram(
            "itl_seconds", "gap before each token but the first, in s", TPOT_BUCKETS
        )
        self.migrations = self._counter("migrations_total", "choices that went on on another instance")
        self.prompt_tokens = self._counter("prompt_tokens_total", "prompt tokens of admitted requests")
        self.generated_tokens = self._counter("generated_tokens_total", "output tokens received")
        self.frames_missed = self._counter("frames_missed_total", "frames that had to be asked for again")


class RouterMetrics(ServiceMetrics):
    def __init__(self, instance: str, role: Role = "router") -> None:
        super().__init__(instance, role)
        self.requests = self._counters(
            "requests_total", "route requests, by answer", "status", "ok", "rejected"
        )
        self.assignments = self._counters("assignments_total", "requests given to an instance", "target")
        self.prefix_index_blocks = self._gauge(
            "prefix_index_blocks", "blocks known to be cached, summed over all workers"
        )
        self.prefix_index_snapshots = self._counter(
            "prefix_index_snapshots_total", "snapshots asked of workers, some of whose events were missed"
        )
        self.instances = self._gauges(
            "instances", "instances usable now, by role", "kind", "prefill", "decode"
        )
