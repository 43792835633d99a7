"""A KV pool by its URL, the setting `kv_pool`. Knows the schemes and their options, not how a store works."""

import re
from pathlib import Path
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from common.errors import ConfigError
from common.kv.pool.base import KVPool, PoolMeter
from common.kv.pool.file import FilePool
from common.kv.pool.mooncake import MooncakeOptions, MooncakePool

FORMS = "file:///DIRECTORY?max_bytes=8GiB or mooncake://HOST:PORT?replicas=1&segment=512MiB"
_UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


async def open_pool(
    url: str,
    block_bytes: int,
    meter: PoolMeter,
    *,
    timeout_s: float = 2.0,
    host: str = "127.0.0.1",
) -> KVPool:
    """The pool at `url`, for blocks of `block_bytes` bytes.

    `timeout_s`: the longest that any call may take. `host`: the name by which other machines reach this one.
    Raises ConfigError; a distributed pool that merely cannot be reached now is no error here, its calls
    say so.
    """
    parts = urlsplit(url)
    if parts.scheme == "file":
        options = _options(parts, "max_bytes")
        max_bytes = _size("max_bytes", options["max_bytes"]) if "max_bytes" in options else None
        if parts.netloc or not parts.path.strip("/"):
            raise ConfigError(f"kv_pool: {url!r} names no absolute directory; write {FORMS}")
        path = Path(unquote(parts.path))
        return await FilePool.open(path, block_bytes, meter, max_bytes=max_bytes, timeout_s=timeout_s)
    if parts.scheme == "mooncake":
        return MooncakePool(_mooncake(url, parts, host), block_bytes, meter, timeout_s=timeout_s)
    raise ConfigError(f"kv_pool: {url!r} is no pool; choose {FORMS}")


def _mooncake(url: str, parts: SplitResult, host: str) -> MooncakeOptions:
    options = _options(parts, "metadata", "segment", "replicas", "protocol", "devices")
    replicas = options.pop("replicas", "1")
    if not replicas.isdecimal() or not int(replicas):
        raise ConfigError(f"kv_pool: replicas={replicas!r} is no number of replicas; one is the least")
    segment = options.pop("segment", "512MiB")
    try:
        port = parts.port
    except ValueError:
        port = None
    if not parts.hostname or not port or parts.path.strip("/"):
        raise ConfigError(f"kv_pool: {url!r} does not name the master's host and port; write {FORMS}")
    return MooncakeOptions(
        master_host=parts.hostname,
        master_port=port,
        host=host,
        segment_bytes=0 if segment == "0" else _size("segment", segment),
        replicas=int(replicas),
        **options,
    )


def _options(parts: SplitResult, *known: str) -> dict[str, str]:
    """What follows the question mark. Raises ConfigError for what is not among `known`."""
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    for key in options.keys() - set(known):
        raise ConfigError(f"kv_pool: {parts.scheme} pools have no {key!r}; choose from {', '.join(known)}")
    return options


def _size(key: str, text: str) -> int:
    found = re.fullmatch(r"([0-9]+) ?(|KiB|MiB|GiB|TiB)", text)
    if not found or not int(found[1]):
        raise ConfigError(f"kv_pool: {key}={text!r} is no size; write it in bytes, or like 512MiB or 8GiB")
    return int(found[1]) * _UNITS[found[2]]
