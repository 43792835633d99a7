"""What a further worker is told: read back by a real shell, and by the settings."""

import subprocess
from pathlib import Path

import pytest

from common.config import DecodeSettings, GatewaySettings, RouterSettings, resolve
from deploy.local.join import worker_environment, write_worker_environment
from deploy.local.spec import ClusterSpec, plan_processes

SHARED = {"GALLEY_NATS_URL": "nats://word@127.0.0.1:4999", "GALLEY_SECRET": "it's $HOME"}


def environment(spec: ClusterSpec) -> dict[str, str]:
    return worker_environment(plan_processes(spec), SHARED)


def test_a_further_worker_is_like_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = ClusterSpec(
        topology="colocated", settings={"num_blocks": "64", "ucx.tls": "tcp", "dtype": "float32"}, cores="0"
    )
    for name, value in environment(spec).items():
        monkeypatch.setenv(name, value)
    settings = resolve(DecodeSettings, [])
    assert (settings.num_blocks, settings.ucx.tls, settings.dtype) == (64, "tcp", "float32")
    assert settings.policy == "prefill_first"
    assert settings.nats_servers == ["nats://word@127.0.0.1:4999"]
    assert settings.secret.get_secret_value() == "it's $HOME"
    assert settings.cores == ""
    assert settings.instance.startswith("decode-")
    assert settings.instance != "decode-0"


def test_a_gateway_and_a_router_by_hand_are_like_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    edge = {"api_keys_file": "/etc/keys", "tls_cert": "/etc/chain.pem", "cors_origins": "https://a.example"}
    for name, value in environment(ClusterSpec(topology="chunked", gateways=2, settings=edge)).items():
        monkeypatch.setenv(name, value)
    gateway = resolve(GatewaySettings, [])
    assert (gateway.api_keys_file, gateway.tls_cert) == (Path("/etc/keys"), Path("/etc/chain.pem"))
    assert gateway.allowed_origins == {"https://a.example"}
    assert (gateway.port, gateway.reuse_port) == (8000, True)
    assert resolve(RouterSettings, []).topology == "chunked"


def test_a_bus_and_a_secret_of_ones_own_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GALLEY_NATS_URL", "nats://elsewhere:4222")
    monkeypatch.setenv("GALLEY_SECRET", "mine")
    monkeypatch.setenv("GALLEY_CLUSTER", "blue")
    variables = worker_environment(plan_processes(ClusterSpec()), {})
    assert variables["GALLEY_NATS_URL"] == "nats://elsewhere:4222"
    assert variables["GALLEY_SECRET"] == "mine"
    assert variables["GALLEY_CLUSTER"] == "blue"


def test_a_shell_reads_the_same_and_nobody_else_reads_it(tmp_path: Path) -> None:
    file = tmp_path / "worker.env"
    write_worker_environment(file, SHARED, tmp_path / "galley.toml")
    assert file.stat().st_mode & 0o777 == 0o600
    script = f'set -a; . {file}; set +a; printf "%s|%s" "$GALLEY_NATS_URL" "$GALLEY_SECRET"'
    seen = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout
    assert seen == "nats://word@127.0.0.1:4999|it's $HOME"
    assert f"# and --config {tmp_path}/galley.toml" in file.read_text()
