"""API keys: what a file may say, and who is let in."""

import hashlib
from pathlib import Path

import pytest

from common.errors import ConfigError
from services.gateway.http.keys import KeyRing, hash_line, new_key, read_keys


def test_a_key_is_known_by_its_hash_alone(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    key = new_key()
    file.write_text(f"# people\n\n{hash_line('sk-old')}\n{hash_line(key, 'alice, since May')}\n")
    assert key not in file.read_text()
    ring = read_keys(file)
    assert ring.knows(key)
    assert ring.knows("sk-old")
    assert not ring.knows(key[:-1])
    assert not ring.knows(hashlib.sha256(key.encode()).hexdigest())
    assert not ring.knows("")


def test_the_hash_is_the_one_that_sha256sum_gives() -> None:
    # printf %s abc | sha256sum (FIPS 180-2, example 1)
    digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert hash_line("abc") == f"sha256:{digest}"


def test_keys_are_long_and_new_each_time() -> None:
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(len(key) > 40 and key.isascii() and " " not in key for key in keys)


def test_without_keys_nobody_is_let_in() -> None:
    assert not KeyRing(()).knows("")


@pytest.mark.parametrize(
    ("text", "said"),
    [("", "has no key"), ("# none\n", "has no key"), ("sk-plain\n", "line 1"), ("\nsha256:12\n", "line 2")],
)
def test_a_file_that_is_none_is_told_at_the_start(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_keys(file)


def test_a_missing_file_is_told_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="api_keys_file"):
        read_keys(tmp_path / "nowhere")
