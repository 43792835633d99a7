"""Which UCX settings are fastest on this machine: each candidate is tried between two child processes.

A process can hardly try several UCX configurations, so `transport/ucx_probe.py` runs as two short-lived
children per candidate, one serving blocks and one pulling them. The result is kept in the cache directory
by host, versions and candidates; a lock lets workers that start together test once. It speaks of this
machine with itself: a pair on two machines may use another transport, which `KVTransport.name` tells.
"""

import asyncio
import fcntl
import hashlib
import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import orjson
import structlog

from common.config import UcxSettings

PROBE_S = 15.0
"""Longest time for one candidate; it takes one or two seconds."""
PROBE_VERSION = 2
"""Raised when ucx_probe.py measures something else than before: what it found then is not believed."""
KEPT_S = 7 * 86_400.0
"""How long a result is believed: the machine may have been in a bad mood."""

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class UcxOptions:
    """UCX's own settings; an empty field leaves the choice to UCX."""

    tls: str = ""
    rndv_thresh: str = ""
    rndv_scheme: str = ""
    progress_mode: str = ""

    def config(self) -> dict[str, str]:
        """As UCX spells them. Keepalive finds dead peers on shared memory, where no connection breaks."""
        given = {"TLS": self.tls, "RNDV_THRESH": self.rndv_thresh, "RNDV_SCHEME": self.rndv_scheme}
        always = {"MM_ERROR_HANDLING": "y", "KEEPALIVE_INTERVAL": "1s"}
        return always | {key: value for key, value in given.items() if value}


@dataclass(frozen=True, slots=True)
class SelfTest:
    """The fastest candidate: `gbps` are 1e9 bytes per second over `transport`."""

    options: UcxOptions
    gbps: float
    transport: str


def candidates(settings: UcxSettings) -> list[UcxOptions]:
    """What to try: eager, UCX's rendezvous by get and by put, and what it would choose by itself.

    Settings that are given stay in all.
    """
    fixed = UcxOptions(settings.tls, settings.rndv_thresh, settings.rndv_scheme, settings.progress_mode)
    if fixed.rndv_thresh and fixed.rndv_scheme:
        return [fixed]
    eager = [] if fixed.rndv_scheme else [replace(fixed, rndv_thresh=fixed.rndv_thresh or "inf")]
    schemes = [fixed.rndv_scheme] if fixed.rndv_scheme else ["get_zcopy", "put_zcopy"]
    if fixed.rndv_thresh == "inf":
        return eager
    own_choice = [] if fixed.rndv_scheme else [fixed]
    return [*eager, *(replace(fixed, rndv_scheme=scheme) for scheme in schemes), *own_choice]


async def self_test(tried: Sequence[UcxOptions], cache_dir: Path) -> SelfTest | None:
    """The fastest of `tried`, or None when none of them works. A few seconds, or none from the cache.

    Where the cache cannot be written it is measured at every start.
    """
    path = cache_dir / f"ucx-{_cache_key(tried)}.json"
    with _locked(await asyncio.to_thread(_lock, path)):
        cached = _read(path)
        if cached is not None:
            return cached
        results = [result for options in tried if (result := await probe(options)) is not None]
        if not results:
            return None
        best = max(results, key=lambda result: result.gbps)
        _write(path, best)
        return best


async def probe(options: UcxOptions) -> SelfTest | None:
    """Time one candidate between two children; None, and a warning, when it does not work."""
    text = orjson.dumps(asdict(options)).decode()
    children: list[asyncio.subprocess.Process] = []
    try:
        async with asyncio.timeout(PROBE_S):
            server = await _child("serve", text)
            children.append(server)
            address = await _line(server)
            client = await _child("pull", text, address)
            children.append(client)
            measured = orjson.loads(await _line(client))
            return SelfTest(options, float(measured["gbps"]), str(measured["transport"]))
    except (TimeoutError, OSError, ValueError, KeyError) as error:
        _log.warning("UCX setting does not work here", options=options, error=repr(error))
        return None
    finally:
        for child in children:
            if child.returncode is None:
                child.kill()
            await child.wait()


async def _child(*args: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "common.transport.ucx_probe", *args),
        cwd=Path(__file__).parents[2],
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )


async def _line(child: asyncio.subprocess.Process) -> str:
    """The child's answer; UCX itself may write to its output before that."""
    assert child.stdout is not None
    while line := await child.stdout.readline():
        if line.startswith(b"probe "):
            return line.removeprefix(b"probe ").decode().strip()
    raise ValueError("the child ended without an answer")


def _cache_key(tried: Sequence[UcxOptions]) -> str:
    what: list[object] = [PROBE_VERSION, [asdict(options) for options in tried]]
    what += [platform.node(), platform.machine(), os.cpu_count()]
    for package in ("ucxx-cu12", "libucx-cu12", "galley"):
        try:
            what.append(version(package))
        except PackageNotFoundError:
            what.append("")
    return hashlib.blake2b(orjson.dumps(what), digest_size=8).hexdigest()


def _lock(path: Path) -> int | None:
    """None where there can be no lock: then there is no cache to share either."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o644)
    except OSError:
        return None
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


@contextmanager
def _locked(lock: int | None) -> Iterator[None]:
    try:
        yield
    finally:
        if lock is not None:
            os.close(lock)


def _read(path: Path) -> SelfTest | None:
    try:
        if time.time() - path.stat().st_mtime > KEPT_S:
            return None
        raw = orjson.loads(path.read_bytes())
        return SelfTest(UcxOptions(**raw["options"]), float(raw["gbps"]), str(raw["transport"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(path: Path, result: SelfTest) -> None:
    fresh = path.with_suffix(f".{os.getpid()}")
    try:
        fresh.write_bytes(orjson.dumps(asdict(result)))
        fresh.rename(path)
    except OSError as error:  # read-only or full
        _log.warning("the UCX self-test cannot be remembered", error=str(error))
        with suppress(OSError):
            fresh.unlink()
