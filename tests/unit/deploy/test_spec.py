"""What a ClusterSpec starts, on a machine of eight cores."""

from pathlib import Path
from typing import get_args

import pytest

from common.config import (
    SERVICES,
    DecodeSettings,
    EngineSettings,
    PrefillSettings,
    RouterSettings,
    Topology,
    resolve,
)
from common.errors import ConfigError
from deploy.local.presets import DIRECTORY, Preset, preset_values
from deploy.local.spec import ClusterSpec, ProcessSpec, plan_processes, share_cores


@pytest.fixture(autouse=True)
def _eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: set(range(8)))


def named(plans: list[ProcessSpec]) -> dict[str, ProcessSpec]:
    return {plan.name: plan for plan in plans}


def engine(plan: ProcessSpec) -> EngineSettings:
    assert isinstance(plan.settings, EngineSettings)
    return plan.settings


def test_the_default_is_one_of_each_at_the_agreed_ports() -> None:
    plans = plan_processes(ClusterSpec())
    assert [(plan.role, plan.name, plan.settings.port) for plan in plans] == [
        ("router", "router-0", 8001),
        ("prefill", "prefill-0", 0),
        ("decode", "decode-0", 0),
        ("gateway", "gateway-0", 8000),
    ]
    assert all(plan.settings.instance == plan.name for plan in plans)
    assert plans[2].command[1:4] == ["-m", "services.decode", "--instance=decode-0"]


def test_another_gateway_port_leaves_the_router_any_port() -> None:
    plans = named(plan_processes(ClusterSpec(port=9000)))
    assert (plans["gateway-0"].settings.port, plans["router-0"].settings.port) == (9000, 0)
    plans = named(plan_processes(ClusterSpec(port=9000, router_port=9001)))
    assert plans["router-0"].settings.port == 9001


@pytest.mark.parametrize(
    ("topology", "workers", "policy"),
    [
        ("disaggregated", ["prefill-0", "prefill-1", "decode-0", "decode-1"], "decode_first"),
        ("pooled", ["prefill-0", "prefill-1", "decode-0", "decode-1"], "decode_first"),
        ("chunked", ["decode-0", "decode-1"], "decode_first"),
        ("colocated", ["decode-0", "decode-1"], "prefill_first"),
    ],
)
def test_a_topology_decides_who_runs_and_who_goes_first(
    topology: Topology, workers: list[str], policy: str
) -> None:
    plans = plan_processes(ClusterSpec(prefill=2, decode=2, topology=topology))
    assert [plan.name for plan in plans[1:-1]] == workers
    router = plans[0].settings
    assert isinstance(router, RouterSettings)
    assert router.topology == topology
    assert engine(named(plans)["decode-0"]).policy == policy


def test_hybrid_is_a_preset_of_disaggregated() -> None:
    plans = named(plan_processes(ClusterSpec(topology="hybrid")))
    router = plans["router-0"].settings
    assert isinstance(router, RouterSettings)
    assert (router.topology, router.routing_policy) == ("disaggregated", "prefix_aware")
    assert router.local_prefill_below_tokens == engine(plans["decode-0"]).chunk_tokens == 128
    assert engine(plans["prefill-0"]).chunk_tokens == 256


def test_a_preset_gives_way_to_all_that_was_set(tmp_path: Path) -> None:
    config = tmp_path / "galley.toml"
    config.write_text("local_prefill_below_tokens = 7\n[decode]\nchunk_tokens = 9\n")
    spec = ClusterSpec(topology="hybrid", config=config, settings={"routing_policy": "round_robin"})
    plans = named(plan_processes(spec))
    router = plans["router-0"].settings
    assert isinstance(router, RouterSettings)
    assert (router.local_prefill_below_tokens, router.routing_policy) == (7, "round_robin")
    assert engine(plans["decode-0"]).chunk_tokens == 9


@pytest.mark.parametrize("preset", get_args(Preset))
def test_every_preset_is_a_settings_file_that_any_service_can_be_given(preset: Preset) -> None:
    for role, cls in SERVICES.items():
        settings = resolve(cls, [f"--config={DIRECTORY / f'{preset}.toml'}"])
        for key, text in preset_values(preset, role).items():
            assert str(getattr(settings, key)).lower() == text.lower()


def test_pooled_has_to_have_a_pool() -> None:
    with pytest.raises(ConfigError, match="topology pooled needs a kv_pool"):
        plan_processes(ClusterSpec(topology="pooled", settings={"kv_pool": ""}))
    plans = named(plan_processes(ClusterSpec(settings={"kv_pool": "file:///tmp/kv?max_bytes=1GiB"})))
    assert engine(plans["decode-0"]).kv_pool == "file:///tmp/kv?max_bytes=1GiB"


def test_workers_share_cores_threads_and_memory() -> None:
    plans = named(plan_processes(ClusterSpec(prefill=1, decode=2, cores="0,2-6")))
    assert [engine(plans[name]).cores for name in ("prefill-0", "decode-0", "decode-1")] == [
        "0,2",
        "3,4",
        "5,6",
    ]
    assert engine(plans["decode-0"]).threads == 2
    assert engine(plans["decode-0"]).memory_fraction == pytest.approx(0.8 / 3, abs=1e-4)


def test_without_cores_each_worker_gets_its_part_of_the_threads() -> None:
    plans = named(plan_processes(ClusterSpec(prefill=1, decode=2)))
    assert (engine(plans["decode-1"]).threads, engine(plans["decode-1"]).cores) == (2, "")
    plans = named(plan_processes(ClusterSpec(decode=20)))
    assert engine(plans["decode-19"]).threads == 1


def test_what_the_user_set_is_left_alone(tmp_path: Path) -> None:
    config = tmp_path / "galley.toml"
    config.write_text("threads = 7\n[decode]\npolicy = 'decode_first'\n")
    settings = {"memory_fraction": "0.3", "ucx.tls": "tcp", "dtype": "float32", "request_timeout_s": "9"}
    plans = named(plan_processes(ClusterSpec(topology="colocated", config=config, settings=settings)))
    decode = engine(plans["decode-0"])
    assert isinstance(decode, DecodeSettings)
    assert (decode.threads, decode.policy, decode.memory_fraction) == (7, "decode_first", 0.3)
    assert (decode.ucx.tls, decode.dtype) == ("tcp", "float32")


def test_each_setting_goes_to_the_services_that_have_it() -> None:
    plans = named(plan_processes(ClusterSpec(settings={"request_timeout_s": "9", "num_blocks": "64"})))
    assert "--request-timeout-s=9" in plans["gateway-0"].argv
    assert not any("request-timeout" in word for word in plans["decode-0"].argv)
    prefill = engine(plans["prefill-0"])
    assert isinstance(prefill, PrefillSettings)
    assert prefill.num_blocks == 64


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"settings": {"num_bloks": "3"}}, "unknown key num_bloks; did you mean num_blocks"),
        ({"settings": {"dtype": "float8"}}, "--dtype = 'float8'"),
        (
            {"topology": "ring"},
            "topology = 'ring': must be one of disaggregated, pooled, chunked, colocated, hybrid",
        ),
        (
            {"settings": {"kv_pool": "redis://h"}},
            "--kv-pool = 'redis://h': must be file://... or mooncake://",
        ),
        ({"decode": 0}, "decode = 0: must be 1 to 64 instances"),
        ({"prefill": -1}, "prefill = -1"),
        ({"cores": "6-9"}, "cores = '6-9': this machine gives cores 0,1,2,3,4,5,6,7"),
        ({"cores": "two"}, "cores = 'two'"),
    ],
)
def test_what_cannot_be_started_is_named(spec: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_processes(ClusterSpec(**spec))  # type: ignore[arg-type]
    assert said in caught.value.message


@pytest.mark.parametrize(
    ("cores", "workers", "shares"),
    [
        ("", 2, [(), ()]),
        ("0,1", 2, [(0,), (1,)]),
        ("0", 3, [(0,), (0,), (0,)]),
        ("1,3", 3, [(1,), (3,), (1,)]),
        ("0-4", 2, [(0, 1), (2, 3, 4)]),
        ("0-7", 3, [(0, 1), (2, 3, 4), (5, 6, 7)]),
    ],
)
def test_cores_are_cut_into_runs(cores: str, workers: int, shares: list[tuple[int, ...]]) -> None:
    assert share_cores(cores, workers) == shares


def test_gateways_share_one_port() -> None:
    plans = [plan for plan in plan_processes(ClusterSpec(gateways=2, port=9000)) if plan.role == "gateway"]
    assert [plan.name for plan in plans] == ["gateway-0", "gateway-1"]
    assert all("--reuse-port=true" in plan.argv and "--port=9000" in plan.argv for plan in plans)
    assert "--reuse-port=true" not in plan_processes(ClusterSpec())[-1].argv
    with pytest.raises(ConfigError, match="share one port"):
        ClusterSpec(gateways=2, port=0)
