"""A gateway over real HTTP in the test's own process, in front of workers that say what a test tells them to.

Knows nothing of what a test asks for.
"""

import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from common.clock import SystemClock
from common.config import GatewaySettings
from common.engine.grammar import GrammarCompiler
from common.messages.generation import Accepted, Job, Refused
from common.messages.stream import (
    BoundItem,
    DecodingItem,
    FailedItem,
    FinishItem,
    FrameItem,
    PrefillStats,
    PromptItem,
    TokenLogprobs,
    TokensItem,
)
from common.observability.http import HttpServer, serve_http
from services.gateway.http.api import make_app
from services.gateway.http.middleware import refuse_requests
from services.gateway.tokenizing import ModelTokenizer, TokenizerPool, Vocabulary
from tests.support.scripted_cluster import ScriptedCluster, cluster
from tests.support.tiny_models import CHAT_TEMPLATE, END_ID, make_tokenizer

FAMILY = "삼겹살 👩‍👩‍👧 é"


@dataclass
class Script:
    """What the workers answer to every job: `text` token by token, then `ending`."""

    text: str = "Hello there."
    ending: str = "eos"
    per_turn: int = 10_000
    """Tokens that come in one turn of the event loop."""
    hold_after: int | None = None
    """Tokens after which nothing more comes, until `go_on`."""
    jobs: list[Job] = field(default_factory=list)


class Stage:
    """A gateway that listens on a port, its workers following `script`."""

    def __init__(self, made: ScriptedCluster, server: HttpServer, http: aiohttp.ClientSession) -> None:
        self.made = made
        self.url = server.url()
        self.http = http
        self.script = Script()
        made.workers["p"].answer = self._play

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        """Status and JSON body."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} | headers
        async with self.http.post(self.url + path, data=io.BytesIO(data), headers=headers) as response:
            return response.status, await response.json()

    async def complete(self, **fields: Any) -> tuple[int, Any]:
        return await self.post("/v1/completions", {"model": "tiny", "prompt": "abc"} | fields)

    async def chat(self, **fields: Any) -> tuple[int, Any]:
        messages = [{"role": "user", "content": "Hi"}]
        return await self.post("/v1/chat/completions", {"model": "tiny", "messages": messages} | fields)

    async def events(self, path: str, **fields: Any) -> list[Any]:
        """The data of all events, checked to end with [DONE]."""
        body = {"model": "tiny", "stream": True} | fields
        async with self.http.post(self.url + path, json=body) as response:
            assert response.status == 200, await response.text()
            assert response.headers["Content-Type"].startswith("text/event-stream")
            assert response.headers["X-Request-Id"]
            raw = (await response.read()).decode()
        *events, done, rest = raw.split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in events]

    def _play(self, job: Job) -> Accepted | Refused:
        """Be both workers, in the turns of the event loop that follow."""
        self.script.jobs.append(job)
        ids = self.made.gateway.vocabulary.tokenizer.encode(self.script.text)
        ids = ids[: self.script.hold_after][: job.sampling.max_tokens]
        p, d, key = self.made.workers["p"], self.made.workers["d"], job.key

        def logprobs(token: int) -> tuple[TokenLogprobs, ...]:
            top = ((token, -0.5), (END_ID, -1.5))
            return (
                () if job.sampling.logprobs is None else (TokenLogprobs(-0.5, top[: job.sampling.logprobs]),)
            )

        def start() -> None:
            p.emit(job.gateway, BoundItem(key, d.ref))
            if (count := job.sampling.prompt_logprobs) is not None:
                score = TokenLogprobs(-0.5, tuple((token, -1.0) for token in range(100, 100 + count)))
                p.emit(job.gateway, PromptItem(key, 1, (score,) * (len(job.prompt_ids) - 1)))
            stats = PrefillStats(2, 1.0, 1.0)
            p.emit(job.gateway, TokensItem(key, 0, (ids[0],), logprobs(ids[0]), stats))
            d.emit(job.gateway, DecodingItem(key, 1.0, 1))
            go_on(1)

        def go_on(begin: int) -> None:
            end = begin + self.script.per_turn
            for index, token in enumerate(ids[begin:end], start=begin):
                d.emit(job.gateway, TokensItem(key, index, (token,), logprobs(token)))
            if end < len(ids):
                self.made.loop.call_soon(go_on, end)
            elif self.script.hold_after is None:
                for item in self.ending(job, len(ids)):
                    d.emit(job.gateway, item)

        self.made.loop.call_soon(start)
        return Accepted()

    def ending(self, job: Job, count: int) -> list[FrameItem]:
        """What decode sends at the end, after `count` tokens."""
        if self.script.ending == "fail":
            return [FailedItem(job.key, "worker_failed", "broken for good", False)]
        if self.script.ending == "eos" and count < job.sampling.max_tokens:
            return [
                TokensItem(job.key, count, (END_ID,)),
                FinishItem(job.key, "stop", count + 1, END_ID),
            ]
        return [FinishItem(job.key, "length", count)]


def make_vocabulary(directory: Path, chat_template: str | None = CHAT_TEMPLATE) -> Vocabulary:
    """One token a byte, a context of 256 tokens, and the name "tiny"; its files are put into `directory`."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(directory)
    return Vocabulary(ModelTokenizer(directory), frozenset({END_ID}), 256, "tiny")


@asynccontextmanager
async def open_stage(
    vocabulary: Vocabulary,
    settings: GatewaySettings | None = None,
    grammars: GrammarCompiler | None = None,
) -> AsyncIterator[Stage]:
    """A gateway over HTTP, with a router and workers in this process, who know no grammar."""
    tokenizers = TokenizerPool(vocabulary.tokenizer, vocabulary.max_model_len, grammars=grammars)
    async with cluster(settings=settings, vocabulary=vocabulary) as made:
        app = make_app(made.gateway, tokenizers, SystemClock(), max_body_bytes=1 << 20)
        server = await serve_http(app, "127.0.0.1", 0, refuse=refuse_requests(made.gateway.ids))
        async with aiohttp.ClientSession() as http:
            yield Stage(made, server, http)
        await server.close()
        tokenizers.close()


def error_of(answer: tuple[int, Any], status: int) -> Any:
    """The error of an answer, checked to have OpenAI's shape."""
    assert answer[0] == status, answer
    assert set(answer[1]["error"]) == {"message", "type", "param", "code"}
    return answer[1]["error"]


def text_of(events: list[Any], index: int = 0) -> str:
    """All text of one choice."""
    choices = [c for event in events for c in event["choices"] if c["index"] == index]
    return "".join(c.get("text") or c.get("delta", {}).get("content") or "" for c in choices)


def reasons_of(events: list[Any], index: int = 0) -> list[str]:
    """Every finish reason that one choice was given."""
    choices = [c for event in events for c in event["choices"] if c["index"] == index]
    return [c["finish_reason"] for c in choices if c["finish_reason"]]
