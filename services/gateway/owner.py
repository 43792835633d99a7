"""The owner of one client request: its choices, its deadlines, and who has to be told when it ends.

Pure: events in, effects out. Knows nothing of text, HTTP, the bus and waiting.
"""

from collections.abc import Sequence
from itertools import count

from common.clock import Clock
from common.errors import DeadlineExceeded, GalleyError
from common.ids import AttemptKey, InstanceRef
from common.messages.generation import AbortReason, Refused, Rejected, Route
from common.messages.stream import FrameItem
from common.observability.timeline import Stage
from services.gateway.attempt import STAGES
from services.gateway.choice import ChoiceLife, Envelope
from services.gateway.effects import Effect, Emit, GaveUp
from services.gateway.request import ChoiceSpec


class RequestOwner:
    """Every choice is a job of its own; attempt numbers are drawn from one count, so none repeats.

    The request is done when all choices are. A choice that gives up, a passed deadline and `end` end all
    of them. Methods return the effects to carry out, in order.
    """

    def __init__(
        self, choices: Sequence[ChoiceSpec], envelope: Envelope, *, first_token_timeout_s: float, clock: Clock
    ) -> None:
        numbers = count(1)
        self.envelope = envelope
        self.error: GalleyError | None = None
        """Why the request failed; None while it has not."""
        self._clock = clock
        self._lives = [ChoiceLife(i, spec, envelope, numbers, clock) for i, spec in enumerate(choices)]
        self._first_token_by: float | None = min(envelope.arrival + first_token_timeout_s, envelope.deadline)

    @property
    def done(self) -> bool:
        for life in self._lives:  # noqa: SIM110 - after every token; all() takes thrice as long
            if not life.done:
                return False
        return True

    @property
    def stage(self) -> Stage:
        """That of the choice that has got least far; the last one when all are done."""
        running = [STAGES.index(life.stage) for life in self._lives if not life.done]
        return STAGES[min(running, default=len(STAGES) - 1)]

    @property
    def next_deadline(self) -> float:
        """When `on_time` has to be called, on the clock's scale."""
        return self.envelope.deadline if self._first_token_by is None else self._first_token_by

    @property
    def num_attempts(self) -> int:
        return sum(life.num_attempts for life in self._lives)

    @property
    def workers(self) -> set[InstanceRef]:
        """Who may hold something for the request."""
        return {ref for life in self._lives for ref in life.workers}

    def placement(self, choice: int) -> tuple[InstanceRef | None, InstanceRef | None]:
        """Who computed the choice's prompt and who generates it, as far as it has come to that."""
        return self._lives[choice].placement

    def start(self) -> list[Effect]:
        return self._settle([effect for life in self._lives for effect in life.start()])

    def on_route(self, key: AttemptKey, answer: Route | Rejected) -> list[Effect]:
        return self._settle(self._lives[key.choice].on_route(key.attempt, answer))

    def on_route_failed(self, key: AttemptKey, error: GalleyError) -> list[Effect]:
        return self._settle(self._lives[key.choice].on_route_failed(key.attempt, error))

    def on_refused(self, key: AttemptKey, answer: Refused) -> list[Effect]:
        return self._settle(self._lives[key.choice].on_refused(key.attempt, answer))

    def on_job_lost(self, key: AttemptKey, error: GalleyError) -> list[Effect]:
        return self._settle(self._lives[key.choice].on_job_lost(key.attempt, error))

    def on_item(self, source: InstanceRef, item: FrameItem) -> list[Effect]:
        """An item from `source`; one that is not about the current attempt of a choice changes nothing."""
        if not 0 <= item.key.choice < len(self._lives):
            return []
        return self._settle(self._lives[item.key.choice].on_item(source, item))

    def on_death(self, ref: InstanceRef) -> list[Effect]:
        return self._settle([effect for life in self._lives for effect in life.on_death(ref)])

    def on_time(self) -> list[Effect]:
        """Ends the request if one of its deadlines has passed."""
        if self.done or self._clock.now() < self.next_deadline:
            return []
        what = "its deadline" if self._first_token_by is None else "the deadline of its first token"
        waited = self._clock.now() - self.envelope.arrival
        self.error = DeadlineExceeded(f"the request passed {what} after {waited:.1f} s")
        return self.end("deadline")

    def end_choice(self, choice: int, reason: AbortReason) -> list[Effect]:
        """One choice needs no more tokens."""
        return self._lives[choice].end(reason)

    def end(self, reason: AbortReason) -> list[Effect]:
        """End every choice that still runs."""
        return [effect for life in self._lives for effect in life.end(reason)]

    def _settle(self, effects: list[Effect]) -> list[Effect]:
        for effect in effects:
            if isinstance(effect, Emit) and effect.token_ids:
                self._first_token_by = None
            elif isinstance(effect, GaveUp) and self.error is None:
                self.error = effect.error
        return effects + self.end("superseded") if self.error is not None else effects
