"""What the UCX self-test tries and remembers; trying itself is in tests/integration/test_ucx.py."""

import os
from pathlib import Path

import pytest

from common.config import UcxSettings
from common.transport import ucx_selftest
from common.transport.ucx_selftest import SelfTest, UcxOptions, candidates, self_test


def half_written(cache: Path) -> list[Path]:
    return list(cache.glob(f"ucx-*.{os.getpid()}"))


def cached(directory: Path) -> list[Path]:
    return list(directory.glob("*.json"))


def test_eager_get_put_and_what_ucx_chooses_are_tried() -> None:
    assert candidates(UcxSettings()) == [
        UcxOptions(rndv_thresh="inf"),
        UcxOptions(rndv_scheme="get_zcopy"),
        UcxOptions(rndv_scheme="put_zcopy"),
        UcxOptions(),
    ]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (UcxSettings(tls="tcp", rndv_thresh="inf"), [UcxOptions("tcp", "inf")]),
        (UcxSettings(rndv_scheme="get_zcopy"), [UcxOptions(rndv_scheme="get_zcopy")]),
        (
            UcxSettings(rndv_thresh="8192", rndv_scheme="put_zcopy"),
            [UcxOptions(rndv_thresh="8192", rndv_scheme="put_zcopy")],
        ),
    ],
)
def test_what_is_given_stays_in_every_candidate(given: UcxSettings, expected: list[UcxOptions]) -> None:
    assert candidates(given) == expected
    assert all(tried.tls == given.tls for tried in candidates(given))


def test_ucx_spells_its_settings_its_own_way() -> None:
    config = UcxOptions(tls="sm,tcp", rndv_thresh="inf").config()
    assert config["TLS"] == "sm,tcp"
    assert config["RNDV_THRESH"] == "inf"
    assert "RNDV_SCHEME" not in config
    assert config["MM_ERROR_HANDLING"] == "y"


async def test_the_fastest_is_taken_and_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = {"inf": 3.0, "": 1.0}
    tried: list[UcxOptions] = []

    async def fake(options: UcxOptions) -> SelfTest | None:
        tried.append(options)
        if options.rndv_scheme == "put_zcopy":
            return None
        return SelfTest(options, speeds[options.rndv_thresh], "sm")

    everything = candidates(UcxSettings())

    monkeypatch.setattr(ucx_selftest, "probe", fake)
    best = await self_test(everything, tmp_path)
    assert best == SelfTest(UcxOptions(rndv_thresh="inf"), 3.0, "sm")
    assert tried == everything
    assert await self_test(everything, tmp_path) == best
    assert tried == everything
    await self_test(candidates(UcxSettings(tls="tcp")), tmp_path)
    assert len(tried) > len(everything)


async def test_nothing_works_is_not_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(options: UcxOptions) -> SelfTest | None:
        return None

    monkeypatch.setattr(ucx_selftest, "probe", fails)
    assert await self_test(candidates(UcxSettings()), tmp_path) is None
    assert cached(tmp_path) == []


async def test_a_spoilt_cache_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fake(options: UcxOptions) -> SelfTest | None:
        return SelfTest(options, 1.0, "sm")

    monkeypatch.setattr(ucx_selftest, "probe", fake)
    tried = candidates(UcxSettings())
    best = await self_test(tried, tmp_path)
    for path in cached(tmp_path):
        path.write_text('{"gbps": 1')
    assert await self_test(tried, tmp_path) == best


@pytest.mark.parametrize("in_the_way", ["", "cache"])
async def test_a_cache_that_cannot_be_written(
    in_the_way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fake(options: UcxOptions) -> SelfTest | None:
        return SelfTest(options, 1.0, "sm")

    monkeypatch.setattr(ucx_selftest, "probe", fake)
    tried = candidates(UcxSettings())
    if in_the_way:
        (tmp_path / in_the_way).write_text("a file")
    else:
        await self_test(tried, tmp_path / "cache")
        [result] = cached(tmp_path / "cache")
        result.unlink()
        result.mkdir()
    assert (await self_test(tried, tmp_path / "cache")) == SelfTest(tried[0], 1.0, "sm")
    assert half_written(tmp_path / "cache") == []


async def test_an_old_result_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    speed = 1.0

    async def fake(options: UcxOptions) -> SelfTest | None:
        return SelfTest(options, speed, "sm")

    monkeypatch.setattr(ucx_selftest, "probe", fake)
    tried = candidates(UcxSettings())
    await self_test(tried, tmp_path)
    speed = 2.0
    for path in cached(tmp_path):
        os.utime(path, (0, 0))
    best = await self_test(tried, tmp_path)
    assert best is not None
    assert best.gbps == 2.0


async def test_what_another_probe_found_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fake(options: UcxOptions) -> SelfTest | None:
        return SelfTest(options, speed, "sm")

    monkeypatch.setattr(ucx_selftest, "probe", fake)
    speed = 1.0
    await self_test(candidates(UcxSettings()), tmp_path)
    monkeypatch.setattr(ucx_selftest, "PROBE_VERSION", ucx_selftest.PROBE_VERSION + 1)
    speed = 2.0
    best = await self_test(candidates(UcxSettings()), tmp_path)
    assert best is not None
    assert best.gbps == 2.0
