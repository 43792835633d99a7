"""Who may use the gateway: a file of hashed API keys, and the question whether a key is one of them.

A line of the file is `sha256:HEX`, and whatever follows it is a remark; `#` begins a comment. A key is 256
random bits, so that a plain hash of it tells nothing and costs little. Knows nothing of HTTP.
"""

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable
from pathlib import Path

from common.errors import ConfigError

_PREFIX = "sha256:"
_LINE = re.compile(r"sha256:([0-9a-f]{64})(?:\s.*)?")


def new_key() -> str:
    """A key that nobody has yet."""
    return f"sk-galley-{secrets.token_urlsafe(32)}"


def hash_line(key: str, remark: str = "") -> str:
    """The line of a key file that lets `key` in."""
    return " ".join([_PREFIX + _hash(key), *remark.split()])


class KeyRing:
    """The keys of one file. Without any, nobody is let in."""

    def __init__(self, hashes: Iterable[str]) -> None:
        self._hashes = tuple(hashes)

    def knows(self, key: str) -> bool:
        """Compares with every hash in full, so that the time it takes tells nothing."""
        given = _hash(key)
        return sum(hmac.compare_digest(given, one) for one in self._hashes) > 0


def read_keys(path: Path) -> KeyRing:
    """Raises ConfigError for a file that cannot be read, has no key, or a line that is none."""
    try:
        lines = path.expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"api_keys_file {path}: {error}", param="api_keys_file") from error
    hashes = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line.strip())
        if match is None:
            raise ConfigError(
                f"api_keys_file {path}, line {number}: not a hashed key; `galley key` makes one",
                param="api_keys_file",
            )
        hashes.append(match[1])
    if not hashes:
        raise ConfigError(f"api_keys_file {path} has no key; `galley key` makes one", param="api_keys_file")
    return KeyRing(hashes)


def _hash(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()
