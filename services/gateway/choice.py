"""The life of one choice: a chain of attempts that lasts until one of them finishes.

Pure: events in, effects out (effects.py). Knows nothing of text, HTTP and the bus.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from common.clock import Clock
from common.errors import (
    AttemptsExhausted,
    ContextLengthExceeded,
    DeadlineExceeded,
    GalleyError,
    InvalidRequest,
    NoInstance,
    NoResponders,
    Overloaded,
    WorkerFailed,
)
from common.ids import AttemptKey, InstanceId, InstanceRef, RequestId
from common.messages.generation import (
    SLO,
    Abort,
    AbortReason,
    Job,
    Refused,
    Rejected,
    Route,
    RouteRequest,
)
from common.messages.stream import (
    BoundItem,
    DecodingItem,
    FailedItem,
    FinishItem,
    FrameItem,
    PromptItem,
    TokensItem,
)
from common.observability.timeline import Stage
from services.gateway.attempt import Attempt, Exclusions
from services.gateway.effects import (
    AskRoute,
    Effect,
    Emit,
    EmitPrompt,
    Finished,
    GaveUp,
    Migrated,
    SendAbort,
    SendJob,
    Transferred,
)
from services.gateway.output import OutputTokens, PromptScores
from services.gateway.request import ChoiceSpec

_FINAL = {cls.code: cls for cls in (InvalidRequest, ContextLengthExceeded, DeadlineExceeded, NoInstance)}
"""What a worker may report that another attempt would meet as well."""
NO_INSTANCE_RETRY_S = 1.0

MIN_ABORT_S = 2.0
"""An abort is repeated and remembered at least so long, also when the deadline is its reason."""


@dataclass(frozen=True, slots=True)
class Envelope:
    """What all jobs of one request have in common; `arrival` and `deadline` are on this process's clock."""

    request: RequestId
    gateway: InstanceId
    arrival: float
    deadline: float
    max_attempts: int
    eos_ids: frozenset[int] = frozenset()
    priority: int = 0
    cache_salt: str = ""
    slo: SLO | None = None


class ChoiceLife:
    """One choice of a request:

    | state   | event                                        | next                                     |
    |---------|----------------------------------------------|------------------------------------------|
    | new     | start                                        | routing: AskRoute                        |
    | routing | Route                                        | running: SendJob                         |
    | routing | Rejected, but some are excluded for failing  | routing: AskRoute, they are let in again |
    | routing | Rejected, no router                          | done: GaveUp                             |
    | running | no answer, Refused, FailedItem(retryable),   | routing: SendAbort to all of the old     |
    |         | death of a worker that the attempt needs     | attempt, AskRoute for the next one       |
    | running | FailedItem(not retryable), too many attempts | done: SendAbort, GaveUp                  |
    | running | tokens                                       | running: Emit                            |
    | running | FinishItem and all tokens it counts          | done: Finished                           |
    | any     | end                                          | done: SendAbort                          |

    Answers and items of any attempt but the current one change nothing. Frames may be faster than the
    answer to the job, so that `running` begins with the offer, not with its acceptance. A choice that wants
    its prompt's log probabilities holds its output back until it has them all, and forgets it when the
    attempt is lost before that.
    """

    def __init__(
        self, index: int, spec: ChoiceSpec, envelope: Envelope, numbers: Iterator[int], clock: Clock
    ) -> None:
        self.index = index
        self.spec = spec
        self.done = False
        self.num_attempts = 0
        self._envelope = envelope
        self._numbers = numbers
        self._clock = clock
        self._output = OutputTokens(spec.sampling.max_tokens)
        scored = spec.sampling.prompt_logprobs is not None
        self._scores = PromptScores(len(spec.prompt_ids) if scored else 0)
        self._held_back: list[Effect] = []
        self._excluded = Exclusions()
        self._attempt = Attempt(AttemptKey(envelope.request, 0, index))

    @property
    def stage(self) -> Stage:
        return self._attempt.stage

    @property
    def placement(self) -> tuple[InstanceRef | None, InstanceRef | None]:
        """Who computed the prompt and who generates, as far as it has come to that."""
        attempt = self._attempt
        return attempt.worker, attempt.decode if attempt.split else attempt.worker

    @property
    def workers(self) -> tuple[InstanceRef, ...]:
        """Who may hold something for the current attempt."""
        return () if self.done else self._attempt.workers

    def start(self) -> list[Effect]:
        return self._next_attempt()

    # --- routing ----------------------------------------------------------------------------------

    def on_route(self, attempt: int, answer: Route | Rejected) -> list[Effect]:
        if self.done or attempt != self._attempt.key.attempt or self._attempt.worker is not None:
            return []
        if isinstance(answer, Rejected):
            return self._on_rejected(answer)
        self._attempt.offer(answer.worker, split=answer.decode is not None)
        return [SendJob(self._job(answer))]

    def on_route_failed(self, attempt: int, error: GalleyError) -> list[Effect]:
        if self.done or attempt != self._attempt.key.attempt:
            return []
        return self._give_up(error)

    def _on_rejected(self, answer: Rejected) -> list[Effect]:
        wait = answer.retry_after_s
        if answer.reason == "too_long":
            return self._no_room(answer.message)
        if answer.reason == "overloaded":
            return self._give_up(Overloaded(answer.message, retry_after_s=wait))
        if self._excluded.full:
            return self._give_up(Overloaded("every instance is full; try again", retry_after_s=wait))
        if self._excluded.readmit():
            return [self._ask()]
        return self._give_up(NoInstance(answer.message, retry_after_s=wait))

    # --- the job ----------------------------------------------------------------------------------

    def on_refused(self, attempt: int, answer: Refused) -> list[Effect]:
        """The worker did not take the job and holds nothing of it."""
        worker = self._attempt.worker
        if self.done or attempt != self._attempt.key.attempt or worker is None:
            return []
        if answer.reason == "invalid":
            return self._no_room(answer.message)
        self._excluded.refused(worker, answer.reason)
        return self._retry(WorkerFailed(f"{worker.instance} refused: {answer.message}"), holding=())

    def on_job_lost(self, attempt: int, error: GalleyError) -> list[Effect]:
        """No answer: nobody listens there, or the worker is slow and may hold the job."""
        worker = self._attempt.worker
        if self.done or attempt != self._attempt.key.attempt or worker is None:
            return []
        if self._attempt.started or self._attempt.has_token:
            return []  # its frames arrive: only the answers were lost
        if not error.retryable:
            return self._give_up(error)
        if isinstance(error, NoResponders):
            self._excluded.gone(worker)
            return self._retry(error, ())
        self._excluded.failed(worker)
        return self._retry(error, self._attempt.workers)

    # --- frames and deaths ------------------------------------------------------------------------

    def on_item(self, source: InstanceRef, item: FrameItem) -> list[Effect]:
        """An item from `source` about this choice."""
        if self.done or item.key.attempt != self._attempt.key.attempt:
            return []
        match item:
            case BoundItem():
                self._attempt.bound(item.decode)
                return []
            case DecodingItem():
                self._attempt.decodes_on(source)
                return [Transferred(self.index, item.transfer_ms)]
            case PromptItem():
                return self._on_scores(item)
            case TokensItem():
                return self._on_tokens(source, item)
            case FinishItem():
                self._output.end(item)
                return self._finish_if_complete()
            case FailedItem():
                return self._on_failed(source, item)

    def on_death(self, ref: InstanceRef) -> list[Effect]:
        """`ref` is dead; what depends on it goes on elsewhere."""
        if self.done or not self._attempt.depends_on(ref):
            return []
        self._excluded.gone(ref)
        # The dead one too: it may come back and still hold the attempt.
        return self._retry(WorkerFailed(f"{ref.instance} died"), self._attempt.workers)

    def end(self, reason: AbortReason) -> list[Effect]:
        """Stop here, whoever decided it; every worker of the attempt is told. Idempotent."""
        if self.done:
            return []
        self.done = True
        return self._aborts(self._attempt.workers, reason)

    def _on_tokens(self, source: InstanceRef, item: TokensItem) -> list[Effect]:
        self._attempt.has_token = True
        if self._attempt.split and source != self._attempt.worker:
            self._attempt.decodes_on(source)
        ids, logprobs = self._output.add(item)
        effects: list[Effect] = []
        if ids or item.prefill:
            effects.append(Emit(self.index, ids, logprobs, item.prefill))
        if not self._scores.complete:
            self._held_back += effects
            return []
        return effects + self._finish_if_complete()

    def _on_scores(self, item: PromptItem) -> list[Effect]:
        if not self._scores.add(item):
            return []
        held_back, self._held_back = self._held_back, []
        return [EmitPrompt(self.index, self._scores.all), *held_back, *self._finish_if_complete()]

    def _finish_if_complete(self) -> list[Effect]:
        finish = self._output.finish
        if finish is None or not self._scores.complete:
            return []
        self.done = True
        return [Finished(self.index, finish.reason, finish.stop_token)]

    def _on_failed(self, source: InstanceRef, item: FailedItem) -> list[Effect]:
        error_class = _FINAL.get(item.code)
        if error_class is not None or not item.retryable:
            wait_s = NO_INSTANCE_RETRY_S if error_class is NoInstance else None
            return self._give_up((error_class or WorkerFailed)(item.message, retry_after_s=wait_s))
        # A transfer has two ends, and which of them is at fault cannot be told from here.
        suspects = self._attempt.workers if item.code == "kv_transfer_failed" else (source,)
        for ref in suspects:
            self._excluded.failed(ref)
        others = tuple(worker for worker in self._attempt.workers if worker != source)
        return self._retry(WorkerFailed(item.message), others)

    # --- from one attempt to the next -------------------------------------------------------------

    def _retry(self, cause: GalleyError, holding: tuple[InstanceRef, ...]) -> list[Effect]:
        effects = self._aborts(holding, "superseded")
        if not self._scores.complete:
            self._output = OutputTokens(self.spec.sampling.max_tokens)
            self._held_back.clear()
        if (ending := self._ended_by_tokens()) is not None:
            self.done = True
            return [*effects, ending]
        if self.num_attempts >= self._envelope.max_attempts:
            self.done = True
            full = Overloaded("every instance is full; try again", retry_after_s=1.0)
            tried = AttemptsExhausted(f"gave up after {self.num_attempts} attempts: {cause.message}")
            return [*effects, GaveUp(self.index, full if self._excluded.full else tried)]
        migrated = Migrated(self.index, cause, len(self._output.ids))
        return [*effects, migrated, *self._next_attempt()]

    def _next_attempt(self) -> list[Effect]:
        self.num_attempts += 1
        self._output.forget_early()
        self._attempt = Attempt(AttemptKey(self._envelope.request, next(self._numbers), self.index))
        return [self._ask()]

    def _ended_by_tokens(self) -> Finished | None:
        """The finish that an attempt lost on its way, when the tokens themselves tell it."""
        ids, sampling = self._output.ids, self.spec.sampling
        if not ids:
            return None
        stops = sampling.stop_token_ids
        if ids[-1] in stops or (not sampling.ignore_eos and ids[-1] in self._envelope.eos_ids):
            return Finished(self.index, "stop", ids[-1])
        return Finished(self.index, "length") if len(ids) >= sampling.max_tokens else None

    def _no_room(self, message: str) -> list[Effect]:
        """Nobody can hold the choice as long as it is by now: what has been said so far is the answer."""
        if not self._output.ids:
            return self._give_up(ContextLengthExceeded(message, param="prompt"))
        return [*self.end("superseded"), Finished(self.index, "length", None)]

    def _give_up(self, error: GalleyError) -> list[Effect]:
        return [*self.end("superseded"), GaveUp(self.index, error)]

    def _aborts(self, targets: tuple[InstanceRef, ...], reason: AbortReason) -> list[Effect]:
        left = max(MIN_ABORT_S, self._envelope.deadline - self._clock.now())
        abort = Abort(self._attempt.key, left, reason)
        return [SendAbort(target, abort) for target in targets]

    def _ask(self) -> AskRoute:
        num_output = len(self._output.ids)
        request = RouteRequest(
            key=self._attempt.key,
            gateway=self._envelope.gateway,
            prompt_tokens=len(self.spec.prompt_ids) + num_output,
            max_tokens=self.spec.sampling.max_tokens - num_output,
            exclude=self._excluded.refs,
            slo=self._envelope.slo,
        )
        if not self._scores.complete:  # a prompt's log probabilities come of computing it
            return AskRoute(request)
        salt = self._envelope.cache_salt
        return AskRoute(request, self.spec.prompt_ids, tuple(self._output.ids), salt)

    def _job(self, route: Route) -> Job:
        now, envelope = self._clock.now(), self._envelope
        sampling = self.spec.sampling
        if self._scores.complete:
            sampling = replace(sampling, prompt_logprobs=None)
        return Job(
            key=self._attempt.key,
            gateway=envelope.gateway,
            worker=route.worker,
            decode=route.decode,
            prompt_ids=self.spec.prompt_ids,
            output_ids=tuple(self._output.ids),
            sampling=sampling,
            time_left_s=max(0.0, envelope.deadline - now),
            age_s=now - envelope.arrival,
            priority=envelope.priority,
            cache_salt=envelope.cache_salt,
            slo=envelope.slo,
        )
