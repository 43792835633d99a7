"""One request while it runs: the owner's decisions turned into text for the reader, and its end.

Synchronous, on the event loop. What has to be asked of others goes to the `Errands` it is given. Knows
nothing of the bus, HTTP and waiting.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

import structlog

from common.clock import Clock
from common.errors import GalleyError, Overloaded
from common.ids import InstanceRef
from common.messages.generation import AbortReason
from common.messages.stream import FrameItem, PrefillStats, TokensItem
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
from services.gateway.owner import RequestOwner
from services.gateway.recording import RequestRecord, to_ms
from services.gateway.reply import Reply
from services.gateway.request import Delta, Generation, Timing, Usage
from services.gateway.text import ChoiceText

log = structlog.get_logger()


class Errands(Protocol):
    """Carries out what a request wants of others; answers come back through the flow's `feed`."""

    def ask_route(self, flow: "RequestFlow", effect: AskRoute) -> None: ...

    def send_job(self, flow: "RequestFlow", effect: SendJob) -> None: ...

    def send_abort(self, effect: SendAbort) -> None: ...


class RequestFlow:
    """Joins owner, text, reply and record of one request. `feed` and `items` take what has happened to it."""

    def __init__(
        self,
        generation: Generation,
        owner: RequestOwner,
        texts: list[ChoiceText],
        record: RequestRecord,
        errands: Errands,
        clock: Clock,
        *,
        retire: Callable[["RequestFlow"], None],
        max_unread_bytes: int,
    ) -> None:
        self.generation = generation
        self.owner = owner
        self.record = record
        self.reply = Reply(
            max_unread_bytes * len(texts),
            usage=lambda: self.usage,
            timing=lambda: self.timing,
            on_overflow=lambda: self.abort("slow_reader"),
            on_close=lambda: self.abort("client"),
        )
        self._texts = texts
        self._errands = errands
        self._retire = retire
        self._clock = clock
        self._cached: dict[int, int] = {}
        """Per choice: tokens of its prompt that its first prefill found cached."""
        self._worker_times: dict[str, float] = {}
        """What its workers say about the first choice, by field of Timing."""
        self._over = False

    def start(self) -> None:
        self.feed(self.owner.start)

    @property
    def begun(self) -> bool:
        """Whether it has had a token."""
        return self.record.timeline.first_token is not None

    def items(self, source: InstanceRef, items: Iterable[FrameItem]) -> None:
        """What a frame has about this request; what is old or strange changes nothing."""
        for item in items:
            plain = type(item) is TokensItem and self.record.stage == "decoding"
            self._carry_out(partial(self.owner.on_item, source, item), moved=not plain)
        self._deliver()

    def feed(
        self, decide: Callable[[], list[Effect]], *, moved: bool = True, ended_by: AbortReason | None = None
    ) -> None:
        """Have the owner decide, and carry it out; `moved` says that the request's stage may have changed.

        `ended_by` is why, if this ends the request without an answer.
        """
        self._carry_out(decide, moved=moved, ended_by=ended_by)
        self._deliver()

    def _deliver(self) -> None:
        try:
            self.reply.deliver()
        except Exception:
            self._broke()

    def _carry_out(
        self, decide: Callable[[], list[Effect]], *, moved: bool, ended_by: AbortReason | None = None
    ) -> None:
        """What cannot be digested ends this request, not the gateway with all others."""
        try:
            for effect in decide():
                self._perform(effect)
            if self._over:
                return
            if self.owner.done:
                self._close(self.owner.error, ended_by or "")
            elif moved:
                self.record.enter(self.owner.stage, self._clock.now())
        except Exception:
            self._broke()

    def _broke(self) -> None:
        log.exception("request broke", request_id=self.generation.request)
        self.abort("internal", GalleyError("something went wrong inside the gateway"))

    def time(self) -> None:
        """One of the deadlines may have passed."""
        self.feed(self.owner.on_time, moved=False, ended_by="deadline")

    def abort(self, reason: AbortReason, error: GalleyError | None = None) -> None:
        """End the request for a reason outside of it; the reader gets `error` if it still reads."""
        if self._over:
            return
        for effect in self.owner.end(reason):
            self._perform(effect)
        if reason == "slow_reader":
            self.reply.lose(Overloaded("the reader of this stream is too slow"))
        self._close(error, reason)

    @property
    def usage(self) -> Usage:
        prompts: dict[int, int] = {}
        cached: dict[int, int] = {}
        for index, spec in enumerate(self.generation.choices):
            prompts[spec.prompt] = len(spec.prompt_ids)
            if (found := self._cached.get(index)) is not None:
                cached[spec.prompt] = min(cached.get(spec.prompt, found), found)
        completion = sum(text.num_tokens for text in self._texts)
        return Usage(sum(prompts.values()), completion, sum(cached.values()))

    @property
    def timing(self) -> Timing:
        prefill, decode = (ref and ref.instance for ref in self.owner.placement(0))
        timeline = self.record.timeline
        return Timing(
            **self._worker_times,
            ttft_ms=to_ms(timeline.ttft_s),
            tpot_ms=to_ms(timeline.tpot_s),
            prefill=prefill,
            decode=decode,
        )

    def _perform(self, effect: Effect) -> None:
        match effect:
            case EmitPrompt():
                self.reply.put(Delta(effect.choice, "", (), prompt=effect.logprobs))
            case Emit():
                self._emit(effect)
            case Finished():
                self._finish(effect)
            case Transferred():
                if effect.choice == 0:
                    self._worker_times["transfer_ms"] = round(effect.transfer_ms, 2)
            case AskRoute():
                self._errands.ask_route(self, effect)
            case SendJob():
                self._errands.send_job(self, effect)
            case SendAbort():
                self._errands.send_abort(effect)
            case Migrated():
                self.record.migrated(effect.choice, effect.num_tokens, effect.cause)
                if effect.choice == 0:
                    self._worker_times.clear()
            case GaveUp():
                pass  # the owner keeps the error

    def _emit(self, effect: Emit) -> None:
        if effect.prefill is not None:
            self._note_prefill(effect.choice, effect.prefill)
        text = self._texts[effect.choice]
        if not effect.token_ids or text.stopped:
            return
        self.record.tokens(len(effect.token_ids), self._clock.now())
        delta = text.push(effect.token_ids, effect.logprobs)
        if delta.text or delta.tokens or delta.finish:
            self.reply.put(delta)
        if delta.finish is not None:
            for ending in self.owner.end_choice(effect.choice, "stop"):
                self._perform(ending)

    def _finish(self, effect: Finished) -> None:
        text = self._texts[effect.choice]
        if text.stopped:
            return  # a stop string ended it before, and said so
        rest = text.flush()
        self.reply.put(Delta(effect.choice, rest, (), "stop" if text.stopped else effect.reason))

    def _note_prefill(self, choice: int, stats: PrefillStats) -> None:
        prompt = len(self.generation.choices[choice].prompt_ids)
        self._cached.setdefault(choice, min(stats.cached_tokens, prompt))
        if choice == 0:
            self._worker_times |= {
                "queue_ms": round(stats.queue_ms, 2),
                "prefill_ms": round(stats.prefill_ms, 2),
            }

    def _close(self, error: GalleyError | None, aborted: str) -> None:
        self._over = True
        if error is not None:
            self.reply.fail(error)
        else:
            self.reply.end()
        self.record.close(self._clock.now(), self.usage, self.owner.num_attempts, error, aborted)
        self._retire(self)
