"""The router: hears every beat, answers who should take a request, and is in no token's path.

Wires routing/ to the message bus. Holds nothing that the next beats do not tell again, so that routers are
replicas and a restarted one is of use within a second. Knows nothing of HTTP and of processes.
"""

import asyncio
import random
from collections.abc import Callable
from dataclasses import asdict, replace

import structlog

from common.clock import Clock
from common.config import SPLIT, RouterSettings
from common.ids import InstanceRef
from common.messages.cluster import (
    MESSAGE_VERSION,
    Beat,
    GatewayBeat,
    InstanceInfo,
    Role,
    RouterBeat,
    WorkerBeat,
)
from common.messages.generation import DecodeRouteRequest, Rejected, RouteRequest
from common.observability.metrics import RouterMetrics
from common.routing.cluster_view import ClusterView, Instance, pairable
from common.routing.pairs import Pairs
from common.routing.policies import POLICIES, SEES_PREFIXES
from common.routing.prefix_index import PrefixIndex
from common.routing.rules import RequestRouter, RoutingRules
from common.runtime.bus import MessageBus, Reply
from common.runtime.heartbeat import Heartbeat
from common.runtime.micro import MicroService
from services.router.prefix_watch import PrefixWatch

LISTEN_S = 0.6
"""How long a new router hears beats before it answers: three beats of everybody."""
NAMED_BLOCKS = 1024
"""How many of a prompt's first blocks gateways are asked to name: 16,384 tokens' worth, in 32 KiB."""
PAIRS_S = 10.0
"""When those whom `pairs` names should have been heard of, after the start."""

_PARTNER: dict[Role, Role] = {"prefill": "decode", "decode": "prefill"}

log = structlog.get_logger()


class RouterService:
    """Life: listening (beats only) -> answering (in the routers' queue group) -> stopped."""

    def __init__(
        self,
        *,
        bus: MessageBus,
        clock: Clock,
        settings: RouterSettings,
        ref: InstanceRef,
        metrics: RouterMetrics,
        http_url: str = "",
    ) -> None:
        self._bus = bus
        self._clock = clock
        self._beat_s = settings.beat_ms / 1000
        self._metrics = metrics
        looks_at_prefixes = settings.routing_policy in SEES_PREFIXES or settings.local_prefill_below_tokens
        self._info = InstanceInfo(
            ref,
            "router",
            (MESSAGE_VERSION, MESSAGE_VERSION),
            http_url=http_url,
            ready=False,
            names_blocks=NAMED_BLOCKS if looks_at_prefixes else 0,
        )
        self._cluster = settings.cluster
        self._topology = settings.topology
        self._local_fallback = settings.local_prefill_fallback
        self._view = ClusterView(clock)
        self._pairs = Pairs(settings.pairs)
        rules = RoutingRules(
            settings.topology,
            settings.local_prefill_below_tokens,
            settings.local_prefill_fallback,
            self._pairs,
            settings.slo_admission,
        )
        self.index = PrefixIndex()
        """What workers have cached, as far as is known here."""
        self._prefixes = PrefixWatch(bus, self.index, metrics)
        policy = POLICIES[settings.routing_policy](random.Random(ref.incarnation))
        self._router = RequestRouter(self._view, policy, rules, self.index)
        bus.on_state(self._view.on_bus_state)
        bus.report_to(metrics)
        for role in ("prefill", "decode"):
            metrics.instances(role).set_function(self._count_of(role))

    async def run(self, stopping: asyncio.Event) -> None:
        """Serve until `stopping` is set; the bus is connected. Owns every task of the service."""
        subjects = self._bus.subjects
        heartbeat = Heartbeat(self._bus, self._beat, self._beat_s)
        await self._prefixes.start()
        beats = await self._bus.subscribe(subjects.beat, self._on_beat, WorkerBeat, RouterBeat, GatewayBeat)
        micro = MicroService(self._bus, self._clock, self._cluster, lambda: self._info)
        await micro.start()
        async with asyncio.TaskGroup() as tasks:
            owned = [tasks.create_task(heartbeat.run()), tasks.create_task(self._watch())]
            if not await _within(LISTEN_S, stopping):
                queue = subjects.routers
                answering = [
                    await self._bus.subscribe(subjects.route, self._on_route, RouteRequest, queue=queue),
                    await self._bus.subscribe(
                        subjects.route_decode, self._on_route_decode, DecodeRouteRequest, queue=queue
                    ),
                ]
                self._info = replace(self._info, ready=True)
                heartbeat.beat_soon()
                await stopping.wait()
                for subscription in answering:
                    await subscription.unsubscribe()
            self._info = replace(self._info, ready=False, draining=True)
            self._bus.publish(subjects.beat, RouterBeat(self._info))
            for task in owned:
                task.cancel()
        await micro.stop()
        await beats.unsubscribe()
        await self._prefixes.stop()

    def why_not_ready(self) -> str:
        """What keeps a request from being routed; "" for nothing."""
        if not self._bus.connected:
            return "not connected to NATS"
        if not self._info.ready:
            return "listening for instances" if not self._info.draining else "draining"
        splits = self._topology in SPLIT and not self._local_fallback
        needed: tuple[Role, ...] = ("prefill", "decode") if splits else ("decode",)
        missing = [role for role in needed if not self._view.instances(role)]
        if missing:
            return f"no {' and no '.join(missing)} instance"
        decodes = self._view.instances("decode")
        prefills = self._view.instances("prefill")
        if splits and not any(self._router.pairable(p, d) for p in prefills for d in decodes):
            return "no prefill and decode instance that may be paired (KV layout, weights, `pairs`)"
        return ""

    def _beat(self) -> RouterBeat:
        """Ready in a beat means that a request could be routed now, which is what gateways go by."""
        return RouterBeat(replace(self._info, ready=not self.why_not_ready()))

    def fleet(self) -> list[dict[str, object]]:
        """Every instance heard of lately, for `GET /instances`: plain JSON values."""
        return [self._describe(instance) for instance in self._view.all()]

    def _on_beat(self, beat: Beat, _reply: Reply) -> None:
        ref = beat.info.ref
        new = self._view.state(ref) == "unknown"
        self._view.observe(beat)
        if isinstance(beat, WorkerBeat) and self._view.get(ref) is not None:
            self._prefixes.observe(beat)
        if new:
            log.info(
                "instance appeared", target=ref.instance, incarnation=ref.incarnation, kind=beat.info.role
            )
            if strangers := self._strangers(beat.info):
                log.warning(
                    "KV layout or weights differ, no pair of these is used",
                    target=ref.instance,
                    fingerprint=beat.info.fingerprint,
                    others=strangers,
                )

    def _strangers(self, info: InstanceInfo) -> dict[str, str]:
        """Instances of the other worker role that KV of `info` cannot go to or come from: fingerprints."""
        other = _PARTNER.get(info.role)
        if other is None:
            return {}
        others = [one.info for one in self._view.instances(other)]
        return {one.ref.instance: one.fingerprint for one in others if not pairable(info, one)}

    def _on_route(self, request: RouteRequest, reply: Reply) -> None:
        answer = self._router.route(request)
        if isinstance(answer, Rejected):
            self._metrics.requests("rejected").inc()
            log.info("rejected", request_id=request.key.request, reason=answer.reason, detail=answer.message)
        else:
            self._metrics.requests("ok").inc()
            self._metrics.assignments(answer.worker.instance).inc()
        reply(answer)

    def _on_route_decode(self, request: DecodeRouteRequest, reply: Reply) -> None:
        answer = self._router.route_decode(request)
        if isinstance(answer, Rejected):
            log.info("no decode", request_id=request.key.request, detail=answer.message)
        else:
            self._metrics.assignments(answer.decode.instance).inc()
        reply(answer)

    async def _watch(self) -> None:
        told: list[str] = []
        pairs_due = self._clock.now() + PAIRS_S
        while True:
            await asyncio.sleep(self._beat_s)
            if self._clock.now() >= pairs_due and (unknown := self._unknown_in_pairs()) != told:
                told = unknown
                log.warning("`pairs` names instances that nobody has heard of", names=unknown)
            for ref in self._view.deaths(self._clock.now()):
                self.index.drop(ref)
                log.warning("instance died", target=ref.instance, incarnation=ref.incarnation)

    def _unknown_in_pairs(self) -> list[str]:
        names = {
            role: [one.ref.instance for one in self._view.all() if one.info.role == role]
            for role in ("prefill", "decode")
        }
        return self._pairs.unknown(names["prefill"], names["decode"])

    def _count_of(self, role: Role) -> Callable[[], float]:
        return lambda: float(len(self._view.instances(role)))

    def _describe(self, instance: Instance) -> dict[str, object]:
        info = instance.info
        return {
            "instance": info.ref.instance,
            "incarnation": info.ref.incarnation,
            "role": info.role,
            "state": self._view.state(info.ref),
            "ready": info.ready,
            "draining": info.draining,
            "http_url": info.http_url,
            "model": info.model,
            "fingerprint": info.fingerprint,
            "max_model_len": info.max_model_len,
            "block_size": info.block_size,
            "num_blocks": info.num_blocks,
            "cached_blocks": self.index.num_blocks(info.ref),
            "silent_s": round(self._view.silence(info.ref), 3),
            "load": asdict(instance.load),
        }


async def _within(seconds: float, event: asyncio.Event) -> bool:
    """Whether `event` is set before `seconds` have passed."""
    try:
        async with asyncio.timeout(seconds):
            return await event.wait()
    except TimeoutError:
        return False
