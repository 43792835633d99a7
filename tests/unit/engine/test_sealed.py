"""What is published is sound until it is touched, and one at a time publishes it."""

import subprocess
from pathlib import Path

import pytest

from common.engine.sealed import is_sound, locked, publish


@pytest.fixture
def published(tmp_path: Path) -> Path:
    made = tmp_path / "made"
    made.write_bytes(b"0123456789")
    publish(made, tmp_path / "library.so")
    assert not made.exists()
    return tmp_path / "library.so"


def test_published(published: Path) -> None:
    assert published.read_bytes() == b"0123456789"
    assert is_sound(published)


@pytest.mark.parametrize("damage", [b"", b"012345678", b"0123456788", b"01234567890"])
def test_damaged(published: Path, damage: bytes) -> None:
    published.write_bytes(damage)
    assert not is_sound(published)


@pytest.mark.parametrize("damage", [b"", b"0", b"\xff\xfe"])
def test_damaged_seal(published: Path, damage: bytes) -> None:
    published.with_name("library.so.digest").write_bytes(damage)
    assert not is_sound(published)


def test_either_half_alone_is_nothing(published: Path) -> None:
    seal = published.with_name("library.so.digest")
    digest = seal.read_text()
    seal.unlink()
    assert not is_sound(published)
    seal.write_text(digest)
    assert is_sound(published)
    published.unlink()
    assert not is_sound(published)


def test_published_again(published: Path, tmp_path: Path) -> None:
    made = tmp_path / "made"
    made.write_bytes(b"other")
    publish(made, published)
    assert published.read_bytes() == b"other"
    assert is_sound(published)


def test_a_lock_is_held_by_one(tmp_path: Path) -> None:
    path = tmp_path / "not" / "there" / "yet"
    with locked(path):
        assert subprocess.run(["flock", "-n", path, "true"], check=False).returncode == 1
    assert subprocess.run(["flock", "-n", path, "true"], check=False).returncode == 0
