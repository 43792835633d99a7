"""What one request looked like to its client: times, tokens, error; and how a stream's events make it.

Pure: times are passed in, in s of one monotonic clock. Knows nothing of sockets.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import orjson


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request's outcome. Times of day are in s since the load began; spans in s.

    `due` is when it should have been sent and is where `ttft_s` counts from, so a client that falls behind
    does not hide a slow server; `sent` is when it was. `itl_s` are the gaps between events with text, as
    a client sees them: tokens whose text is held back (half a character) come with a later one.
    `output_tokens` is the server's own count where it sends one; `cached_tokens` is how many tokens of the
    prompt it had cached, `timing` what it said of the stages in ms, if anything. `error` is empty for a
    request that ended as it should.
    """

    due: float
    sent: float
    ended: float
    ttft_s: float | None = None
    tpot_s: float | None = None
    itl_s: tuple[float, ...] = ()
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None
    finish_reason: str = ""
    text: str = ""
    status: int = 0
    error: str = ""
    timing: Mapping[str, float] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return not self.error


class StreamLog:
    """Collects the server-sent events of one streamed completion or chat completion with one choice.

    open --[DONE]--> complete, open --left()--> complete; an error event at any time is kept as the
    request's error.
    """

    def __init__(self) -> None:
        self._texts: list[tuple[float, str]] = []
        self._last: float | None = None
        self._finish_reason = ""
        self._usage: tuple[int, int] | None = None
        self._cached: int | None = None
        self._timing: dict[str, float] = {}
        self._error = ""
        self._complete = False

    def add(self, now: float, payload: bytes) -> None:
        """Take in the payload of one `data:` line that arrived at `now`."""
        if payload == b"[DONE]":
            self._complete = True
            return
        try:
            self._take(now, orjson.loads(payload))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            self._error = self._error or f"an event made no sense ({type(error).__name__}): {payload[:200]!r}"

    def left(self) -> None:
        """The client hangs up, which ends the stream as it should."""
        self._complete = True
        self._finish_reason = self._finish_reason or "left"

    def _take(self, now: float, event: Mapping[str, object]) -> None:
        if (error := event.get("error")) is not None:
            self._error = self._error or error_text(error)
        usage, timing = event.get("usage"), event.get("galley")
        if isinstance(usage, dict):
            self._usage = int(usage["prompt_tokens"]), int(usage["completion_tokens"])
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
            self._cached = None if cached is None else int(cached)
        if isinstance(timing, dict):
            self._timing = {key: value for key, value in timing.items() if isinstance(value, int | float)}
        choices = event.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            text = choice.get("text") or choice.get("delta", {}).get("content") or ""
            finish = choice.get("finish_reason") or ""
            if text:
                self._texts.append((now, text))
            if text or finish:
                self._last = now
            self._finish_reason = finish or self._finish_reason

    def record(self, *, due: float, sent: float, ended: float, status: int, error: str = "") -> RequestRecord:
        """What has been seen. `error` is what the transport had to say; a stream that just stops is one."""
        error = self._error or error or self._incompleteness()
        times = [time for time, _ in self._texts]
        first = times[0] if times else self._last
        prompt_tokens, output_tokens = self._usage or (0, len(times))
        tpot = None
        if first is not None and self._last is not None and output_tokens > 1:
            tpot = (self._last - first) / (output_tokens - 1)
        return RequestRecord(
            due=due,
            sent=sent,
            ended=ended,
            ttft_s=None if first is None else first - due,
            tpot_s=tpot,
            itl_s=tuple(after - before for before, after in pairwise(times)),
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            cached_tokens=self._cached,
            finish_reason=self._finish_reason,
            text="".join(text for _, text in self._texts),
            status=status,
            error=error,
            timing=self._timing,
        )

    def _incompleteness(self) -> str:
        if not self._complete:
            return "the stream ended without [DONE]"
        return "" if self._finish_reason else "the stream ended without a finish_reason"


def error_text(error: object) -> str:
    """The message in an OpenAI-shaped error object, or the object itself as text."""
    message = error.get("message") if isinstance(error, dict) else None
    return str(message or error or "an error without a message")
