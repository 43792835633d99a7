"""The pool of a local cluster: its own, empty at first, gone in the end."""

from pathlib import Path

import pytest

from deploy.local import kv_pool
from deploy.local.kv_pool import OwnPool


@pytest.fixture(autouse=True)
def _memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kv_pool, "MEMORY", tmp_path)


def directory(pool: OwnPool) -> Path:
    return Path(pool.url.removeprefix("file://"))


def test_each_run_directory_has_a_pool_of_its_own(tmp_path: Path) -> None:
    pools = [OwnPool("default", tmp_path / name) for name in ("a", "b", "a")]
    assert pools[0].url == pools[2].url != pools[1].url
    assert directory(pools[0]).parent == tmp_path
    assert directory(pools[0]).name.startswith("galley-default-")


def test_what_a_killed_cluster_left_is_removed_and_nothing_is_left_in_the_end(tmp_path: Path) -> None:
    for _ in range(2):
        pool = OwnPool("default", tmp_path / "run")
        assert not directory(pool).exists()
        directory(pool).mkdir()
        (directory(pool) / "object").write_bytes(b"KV")
    pool.remove()
    pool.remove()
    assert not directory(pool).exists()
