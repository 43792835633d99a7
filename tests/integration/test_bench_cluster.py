"""A bench's own cluster: real processes that do nothing, on free ports, gone with the bench."""

from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from rich.console import Console

from bench.cluster import ClusterFailed, own_cluster
from deploy.local.spec import ClusterSpec, ProcessSpec, plan_processes


def fakes(spec: ClusterSpec) -> list[ProcessSpec]:
    return [
        replace(plan, module="tests.support.fake_service", argv=(plan.role, *plan.argv))
        for plan in plan_processes(spec)
    ]


def spec_of(tmp_path: Path, **settings: str) -> ClusterSpec:
    return ClusterSpec(prefill=1, decode=2, settings={"model": str(tmp_path), **settings})


async def test_the_cluster_serves_inside_the_block_and_is_gone_after_it(tmp_path: Path) -> None:
    console = Console(width=120)
    with console.capture() as captured:
        async with (
            own_cluster(spec_of(tmp_path), console, plan=fakes, run_dir=tmp_path / "run") as target,
            httpx.AsyncClient() as http,
        ):
            assert len(target.workers) == 3
            for url in (target.url, *target.workers):
                assert (await http.get(f"{url}/readyz")).status_code == 200
        async with httpx.AsyncClient() as http:
            for url in (target.url, *target.workers):
                with pytest.raises(httpx.ConnectError):
                    await http.get(f"{url}/readyz")
    assert "decode-1 ready" in captured.get()
    assert "exited" not in captured.get()


async def test_a_service_that_dies_is_told_with_its_last_words(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, served_model_name="dies")
    with pytest.raises(ClusterFailed, match="gateway-0 ended with code") as failed:
        async with own_cluster(spec, Console(quiet=True), plan=fakes, run_dir=tmp_path / "run"):
            raise AssertionError("there is no cluster to measure")
    assert "no such architecture: Mamba" in str(failed.value)


async def test_a_wrong_setting_is_told_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ClusterFailed, match=r"block.size"):
        async with own_cluster(spec_of(tmp_path, block_size="0"), Console(quiet=True)):
            raise AssertionError("there is no cluster to measure")


async def test_a_bench_that_fails_leaves_no_cluster(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        async with own_cluster(
            spec_of(tmp_path), Console(quiet=True), plan=fakes, run_dir=tmp_path / "r"
        ) as target:
            raise ZeroDivisionError
    async with httpx.AsyncClient() as http:
        with pytest.raises(httpx.ConnectError):
            await http.get(f"{target.url}/readyz")
