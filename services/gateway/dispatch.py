"""Errands of requests over the bus: asking for routes, offering jobs, ending attempts.

Every question is sent twice at most, unchanged, because core NATS may lose one. Knows nothing of what
the answers mean; they are fed back into the request's flow.
"""

from collections.abc import Callable, Coroutine
from functools import partial
from typing import TypeVar

from common.clock import Clock
from common.errors import (
    ControlError,
    ControlTimeout,
    GalleyError,
    MessageInvalid,
    NoInstance,
    NoResponders,
    WorkerFailed,
)
from common.ids import AttemptKey, InstanceRef
from common.messages.generation import Accepted, Job, Refused, Rejected, Route, RouteRequest
from common.routing.cluster_view import ClusterView
from common.runtime.aborts import abort_until_answered
from common.runtime.bus import MessageBus
from services.gateway.block_names import BlockNamer
from services.gateway.effects import AskRoute, SendAbort, SendJob
from services.gateway.flow import RequestFlow
from services.gateway.membership import Liveness

ANSWER_S = 0.5
"""How long an answer may take before the question is sent again."""
TRIES = 2

A = TypeVar("A")
B = TypeVar("B")
Spawn = Callable[[Coroutine[object, object, None]], object]


class Dispatcher:
    """Starts one task per errand with `spawn`; none of them raises."""

    def __init__(
        self, bus: MessageBus, view: ClusterView, liveness: Liveness, clock: Clock, spawn: Spawn
    ) -> None:
        self._bus = bus
        self._view = view
        self._liveness = liveness
        self._clock = clock
        self._spawn = spawn
        self._namer = BlockNamer(view, clock)
        self._aborting: set[tuple[InstanceRef, AttemptKey]] = set()

    def ask_route(self, flow: RequestFlow, effect: AskRoute) -> None:
        self._spawn(self._route(flow, self._namer.named(effect)))

    def send_job(self, flow: RequestFlow, effect: SendJob) -> None:
        self._spawn(self._job(flow, effect.job))

    def send_abort(self, effect: SendAbort) -> None:
        """Once at a time per target and attempt, whoever asks for it."""
        task = (effect.target, effect.abort.key)
        if task not in self._aborting:
            self._aborting.add(task)
            self._spawn(self._abort(effect))

    async def _route(self, flow: RequestFlow, request: RouteRequest) -> None:
        try:
            answer = await self._ask_twice(self._bus.subjects.route, request, Route, Rejected)
        except NoResponders:
            nobody = NoInstance("no router serves at the moment", retry_after_s=1.0)
            flow.feed(partial(flow.owner.on_route_failed, request.key, nobody))
        except GalleyError as failure:
            flow.feed(partial(flow.owner.on_route_failed, request.key, _unavailable(failure)))
        else:
            flow.feed(partial(flow.owner.on_route, request.key, answer))

    async def _job(self, flow: RequestFlow, job: Job) -> None:
        try:
            subject = self._bus.subjects.job(job.worker.instance)
            answer = await self._ask_twice(subject, job, Accepted, Refused)
        except NoResponders as error:
            self._liveness.nobody_listens(job.worker)
            flow.feed(partial(flow.owner.on_job_lost, job.key, error))
        except MessageInvalid:
            nonsense = WorkerFailed(f"{job.worker.instance} gave an answer that makes no sense")
            flow.feed(partial(flow.owner.on_job_lost, job.key, nonsense))
        except GalleyError as error:
            flow.feed(partial(flow.owner.on_job_lost, job.key, error))
        else:
            if isinstance(answer, Refused):
                flow.feed(partial(flow.owner.on_refused, job.key, answer))

    async def _abort(self, effect: SendAbort) -> None:
        try:
            await abort_until_answered(self._bus, self._view, self._clock, effect.target, effect.abort)
        finally:
            self._aborting.discard((effect.target, effect.abort.key))

    async def _ask_twice(self, subject: str, message: object, a: type[A], b: type[B]) -> A | B:
        for left in reversed(range(TRIES)):
            try:
                return await self._bus.request(subject, message, a, b, timeout_s=ANSWER_S)
            except ControlTimeout:
                if not left:
                    raise
        raise AssertionError("unreachable")


def _unavailable(error: GalleyError) -> GalleyError:
    """The client's error for a router that does not answer sensibly."""
    if isinstance(error, ControlError):
        error.retry_after_s = error.retry_after_s or 1.0
    return error
