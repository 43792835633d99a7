"""A completions server behind httpx, without sockets: answers in loop time as its script says."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import httpx
import orjson

MODEL = "fake"


class _Stream(httpx.AsyncByteStream):
    def __init__(self, steps: Sequence[tuple[float, bytes]], server: "FakeServer") -> None:
        self._steps = steps
        self._server = server

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for wait, chunk in self._steps:
            await asyncio.sleep(wait)
            yield chunk

    async def aclose(self) -> None:
        self._server.running -= 1


@dataclass
class FakeServer:
    """Streams `tokens` after `first_s`, then one each `gap_s`; usage and [DONE] at the end.

    `refuse` numbers requests that get a 503, `cut` those whose stream stops after the first token.
    """

    first_s: float = 0.5
    gap_s: float = 0.1
    tokens: int = 4
    refuse: frozenset[int] = frozenset()
    cut: frozenset[int] = frozenset()
    bodies: list[dict[str, object]] = field(default_factory=list)
    running: int = 0
    most_running: int = 0

    def transport(self) -> httpx.MockTransport:
        return httpx.MockTransport(self._handle)

    async def _handle(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": MODEL, "max_model_len": 64}]})
        number = len(self.bodies)
        self.bodies.append(orjson.loads(request.content))
        if number in self.refuse:
            return httpx.Response(503, json={"error": {"message": "no decode instance", "type": "x"}})
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        steps = self._steps()
        return httpx.Response(200, stream=_Stream(steps[:1] if number in self.cut else steps, self))

    def _steps(self) -> list[tuple[float, bytes]]:
        last = self.tokens - 1
        steps = [
            (self.gap_s if i else self.first_s, event(text=f"t{i} ", finish="length" if i == last else None))
            for i in range(self.tokens)
        ]
        return [*steps, (0.0, usage(3, self.tokens) + b"data: [DONE]\n\n")]


def event(text: str, finish: str | None = None) -> bytes:
    return line({"choices": [{"index": 0, "text": text, "finish_reason": finish}]})


def usage(prompt: int, completion: int) -> bytes:
    return line({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion}})


def line(body: object) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"
