"""What is measured: a gateway, and the workers behind it whose counters tell the rest.

Knows nothing of who started them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import httpx

ROUTER_PORT = 8001
WORKER_ROLES = ("prefill", "decode")
TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Target:
    """`url` is the gateway's; `workers` the prefill and decode workers' HTTP addresses, empty if unknown.

    `pids` has the processes by name, where they are the bench's own.
    """

    url: str
    workers: tuple[str, ...] = ()
    pids: Mapping[str, int] = field(default_factory=dict)


async def find_target(
    url: str, router_url: str | None = None, *, transport: httpx.AsyncBaseTransport | None = None
) -> Target:
    """The gateway at `url`, with the workers that its router lists.

    Without `router_url` the router is looked for on port 8001 of the gateway's host, and believed only if
    it lists a gateway on `url`'s port: another cluster's workers would give wrong figures.
    """
    gateway = httpx.URL(url)
    async with httpx.AsyncClient(timeout=TIMEOUT_S, transport=transport, trust_env=False) as http:
        try:
            response = await http.get(f"{router_url or gateway.copy_with(port=ROUTER_PORT)}/instances")
            instances = _instances(response.raise_for_status().json())
        except (httpx.HTTPError, ValueError, LookupError, TypeError):
            return Target(url)
    ports = {httpx.URL(address).port for role, address in instances if role == "gateway"}
    if router_url is None and gateway.port not in ports:
        return Target(url)
    return Target(url, tuple(address for role, address in instances if role in WORKER_ROLES))


def _instances(body: Mapping[str, list[Mapping[str, str]]]) -> list[tuple[str, str]]:
    """(role, http_url) of each living instance in the router's answer."""
    fleet = [instance for instance in body["instances"] if instance["state"] == "alive"]
    return [(instance["role"], instance["http_url"]) for instance in fleet]
