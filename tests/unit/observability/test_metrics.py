"""Metric names and labels, against the list that operators and tests were promised."""

import re

import pytest

from common.messages.cluster import Role
from common.observability.metrics import GatewayMetrics, RouterMetrics, ServiceMetrics, WorkerMetrics

STAGES = ["requests_queued", "requests_prefilling", "requests_waiting_for_kv", "requests_decoding"]
PROMISED = {
    "gateway": [
        "requests_total",
        "requests_in_flight",
        *STAGES,
        "ttft_seconds",
        "tpot_seconds",
        "itl_seconds",
        "migrations_total",
    ],
    "worker": [
        *STAGES,
        "prompt_tokens_computed_total",
        "generated_tokens_total",
        "kv_received_tokens_total",
        "kv_transfer_seconds",
        "kv_transfer_failures_total",
        "kv_blocks",
        "leases",
        "preemptions_total",
        "recomputed_tokens_total",
    ],
}


def lines(metrics: ServiceMetrics) -> list[str]:
    return [line for line in metrics.exposition().decode().splitlines() if not line.startswith("#")]


def value(metrics: ServiceMetrics, name: str, **labels: str) -> float:
    """The value of one series, read as a scraper reads it."""
    for line in lines(metrics):
        found = re.fullmatch(r"(\w+)\{(.*)\} (\S+)", line)
        assert found, line
        have = dict(re.findall(r'(\w+)="([^"]*)"', found[2]))
        if found[1] == name and labels.items() <= have.items():
            return float(found[3])
    raise AssertionError(f"no series {name} {labels}")


def families(metrics: ServiceMetrics) -> set[str]:
    text = metrics.exposition().decode()
    return set(re.findall(r"^# TYPE galley_(\w+) ", text, re.MULTILINE))


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_workers_have_the_promised_families(role: Role) -> None:
    metrics = WorkerMetrics(f"{role}-0", role)
    assert set(PROMISED["worker"]) <= families(metrics)
    assert {"kv_transfer_bytes_total", "requests_aborted_total", "engine_mode"} <= families(metrics)


def test_the_gateway_has_the_promised_families() -> None:
    assert set(PROMISED["gateway"]) <= families(GatewayMetrics("gateway-0"))


@pytest.mark.parametrize(
    "metrics",
    [WorkerMetrics("x", "decode"), GatewayMetrics("x"), RouterMetrics("x")],
    ids=lambda m: type(m).__name__,
)
def test_every_series_says_whose_it_is(metrics: ServiceMetrics) -> None:
    assert lines(metrics)
    for line in lines(metrics):
        assert line.startswith("galley_")
        assert 'instance="x"' in line
        assert "role=" in line
        assert "_created" not in line


def test_states_and_statuses_exist_before_the_first_request() -> None:
    worker, gateway = WorkerMetrics("decode-0", "decode"), GatewayMetrics("gateway-0")
    for state in ("free", "used", "cached"):
        assert value(worker, "galley_kv_blocks", state=state) == 0
    for state in ("waiting", "reading", "ending"):
        assert value(worker, "galley_leases", state=state) == 0
    assert value(gateway, "galley_requests_total", status="ok") == 0


def test_labelled_families_keep_their_series_apart() -> None:
    worker = WorkerMetrics("decode-0", "decode")
    worker.kv_transfer_bytes("sm").inc(100)
    worker.kv_transfer_bytes("tcp").inc(5)
    worker.kv_transfer_bytes("sm").inc(1)
    assert value(worker, "galley_kv_transfer_bytes_total", transport="sm") == 101
    assert value(worker, "galley_kv_transfer_bytes_total", transport="tcp") == 5


def test_a_gauge_may_mirror_live_state() -> None:
    worker, used = WorkerMetrics("decode-0", "decode"), [1, 2]
    worker.kv_blocks("used").set_function(lambda: len(used))
    used.append(3)
    assert value(worker, "galley_kv_blocks", state="used") == 3


def test_two_services_of_one_process_do_not_share_a_registry() -> None:
    first, second = GatewayMetrics("gateway-0"), GatewayMetrics("gateway-1")
    first.requests("ok").inc()
    assert value(second, "galley_requests_total", status="ok") == 0
