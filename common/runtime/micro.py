"""Health, statistics and discovery by the NATS micro-service convention: `nats micro ls` shows the fleet.

Every service answers PING, INFO and STATS on the `$SRV` subjects with what its message bus knows of its
subscriptions. Format: NATS ADR-32. Knows nothing of what the service does.
"""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Literal

import orjson

from common.clock import Clock
from common.messages.cluster import MESSAGE_VERSION, InstanceInfo
from common.messages.subjects import discovery
from common.runtime.bus import Endpoint, MessageBus
from common.transport.control import Incoming, Subscription

VERSION = f"{MESSAGE_VERSION}.0.0"
"""Semantic version of the messages spoken, which is what a peer can rely on."""


class MicroService:
    """Answers for one instance, from `start` until `stop` or the bus is closed."""

    def __init__(self, bus: MessageBus, clock: Clock, cluster: str, info: Callable[[], InstanceInfo]) -> None:
        self._bus = bus
        self._info = info
        ref, role = info().ref, info().role
        self._name = f"galley-{role}"
        self._id = f"{ref.instance[:40]}-{ref.incarnation[:16]}"
        self._cluster = cluster
        self._started = datetime.fromtimestamp(clock.wall(), UTC)
        self._subscriptions: list[Subscription] = []

    async def start(self) -> None:
        """Raises ControlError."""
        await self._answer("PING", dict)
        await self._answer("INFO", self._endpoints)
        await self._answer("STATS", self._statistics)

    async def stop(self) -> None:
        for subscription in self._subscriptions:
            await subscription.unsubscribe()
        self._subscriptions.clear()

    async def _answer(
        self, verb: Literal["PING", "INFO", "STATS"], body: Callable[[], dict[str, object]]
    ) -> None:
        def respond(incoming: Incoming) -> None:
            answer = {"type": f"io.nats.micro.v1.{verb.lower()}_response", **self._identity(), **body()}
            incoming.reply(orjson.dumps(answer))

        for subject in discovery(verb, self._name, self._id):
            self._subscriptions.append(await self._bus.transport.subscribe(subject, respond))

    def _identity(self) -> dict[str, object]:
        info = self._info()
        metadata = {
            "cluster": self._cluster,
            "instance": info.ref.instance,
            "incarnation": info.ref.incarnation,
            "http_url": info.http_url,
            "model": info.model,
            "state": "draining" if info.draining else "ready" if info.ready else "starting",
        }
        return {"name": self._name, "id": self._id, "version": VERSION, "metadata": metadata}

    def _endpoints(self) -> dict[str, object]:
        return {
            "description": f"Galley {self._info().role}",
            "endpoints": [{**_named(one), "metadata": {}} for one in self._bus.endpoints],
        }

    def _statistics(self) -> dict[str, object]:
        return {
            "started": self._started.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            "endpoints": [_counted(one) for one in self._bus.endpoints],
        }


def _named(endpoint: Endpoint) -> dict[str, object]:
    name = endpoint.subject.split(".", 2)[-1].replace(".", "-")
    return {"name": name, "subject": endpoint.subject, "queue_group": endpoint.queue}


def _counted(endpoint: Endpoint) -> dict[str, object]:
    nanoseconds = round(endpoint.handler_s * 1e9)
    return {
        **_named(endpoint),
        "num_requests": endpoint.num_messages,
        "num_errors": endpoint.num_errors,
        "last_error": endpoint.last_error,
        "processing_time": nanoseconds,
        "average_processing_time": nanoseconds // max(1, endpoint.num_messages),
        "data": None,
    }
