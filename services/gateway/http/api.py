"""OpenAI's endpoints for chat, completions and models, and the app that holds all others too.

Knows nothing of routing, workers and retries.
"""

import asyncio
from collections.abc import Sequence
from hashlib import blake2b
from typing import TypeVar

from aiohttp import web
from aiohttp.typedefs import Handler

from common.clock import Clock
from common.observability.http import add_probes, json_response
from services.gateway.gateway import Gateway
from services.gateway.http.chunks import ChunkNarrator
from services.gateway.http.headers import wants_timing
from services.gateway.http.middleware import expect, label_requests
from services.gateway.http.responses import ResponsesApi
from services.gateway.http.serving import Serving
from services.gateway.http.tokens import TokensApi
from services.gateway.openai.answers import AnswerHead, ChatShape, CompletionShape, Echo
from services.gateway.openai.chat import ChatRequest
from services.gateway.openai.completions import CompletionRequest
from services.gateway.openai.openapi import document
from services.gateway.openai.sampling import SamplingFields
from services.gateway.tokenizing import TokenizerPool

S = TypeVar("S", bound=SamplingFields)


def make_app(
    gateway: Gateway, tokenizers: TokenizerPool, clock: Clock, *, max_body_bytes: int
) -> web.Application:
    """All endpoints and the probes, behind one middleware."""
    app = web.Application(client_max_size=max_body_bytes, middlewares=[label_requests(gateway.ids)])
    serving = Serving(gateway, tokenizers, clock)
    for endpoints in (OpenAIApi(serving), ResponsesApi(serving), TokensApi(serving)):
        for route in endpoints.routes():
            app.add_routes(
                [web.RouteDef(route.method, route.path, route.handler, {"expect_handler": expect})]
            )
    app.add_routes([web.get("/openapi.json", describe(serving))])
    add_probes(app, gateway.metrics, gateway.why_not_ready)
    return app


def describe(serving: Serving) -> Handler:
    """The handler of /openapi.json."""
    tokenizers = serving.tokenizers
    told = document(
        serving.model,
        tokenizers.max_model_len,
        tokenizers.tokenizer.vocab_size,
        takes_empty_prompt=bool(tokenizers.tokenizer.encode("")),
    )

    async def openapi(_: web.Request) -> web.Response:
        return json_response(told)

    return openapi


class OpenAIApi:
    """Handlers over one gateway."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._tokenizers = serving.tokenizers
        self._started = serving.seconds()
        self._fingerprint = "fp_" + blake2b(serving.model.encode(), digest_size=5).hexdigest()

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/v1/models", self.models),
            web.get("/v1/models/{model:.+}", self.model),
            web.post("/v1/chat/completions", self.chat),
            web.post("/v1/completions", self.completions),
        ]

    async def models(self, _: web.Request) -> web.Response:
        return json_response({"object": "list", "data": [self._card()]})

    async def model(self, request: web.Request) -> web.Response:
        self._serving.check_model(request.match_info["model"])
        return json_response(self._card())

    async def chat(self, request: web.Request) -> web.StreamResponse:
        with self._serving.counting_refusals():
            timing = wants_timing(request.headers)
            ask = await self._parse(request, ChatRequest)
            messages = [message.for_template() for message in ask.messages]
            prompt_ids = await self._tokenizers.encode_chat(messages)
            generation = self._serving.generation(request, ask, [prompt_ids], "messages")
        head = self._head(f"chatcmpl-{generation.request}")
        bytes_of = self._tokenizers.tokenizer.bytes_of
        shape = ChatShape(head, bytes_of, logprobs=ask.logprobs, token_ids=ask.return_token_ids)
        narrator = ChunkNarrator(ask, shape, len(generation.choices), timing=timing)
        return await self._serving.answer(request, generation, narrator, stream=ask.stream)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        with self._serving.counting_refusals():
            timing = wants_timing(request.headers)
            ask = await self._parse(request, CompletionRequest)
            texts = [prompt for prompt in ask.prompt if isinstance(prompt, str)]
            encoded = iter(await self._tokenizers.encode(texts) if texts else [])
            prompts = [next(encoded) if isinstance(prompt, str) else prompt for prompt in ask.prompt]
            generation = self._serving.generation(request, ask, prompts, "prompt")
            echo = await asyncio.to_thread(self._echo, ask, prompts) if ask.echo else []
        shape = CompletionShape(
            self._head(f"cmpl-{generation.request}"),
            self._tokenizers.tokenizer.bytes_of,
            logprobs=ask.logprobs is not None,
            token_ids=ask.return_token_ids,
            echo=echo,
        )
        narrator = ChunkNarrator(ask, shape, len(generation.choices), timing=timing)
        return await self._serving.answer(request, generation, narrator, stream=ask.stream)

    def _echo(self, ask: CompletionRequest, prompts: Sequence[Sequence[int]]) -> list[Echo]:
        """The prompt of each choice, as it came or, of token ids, as it reads."""
        decode = self._tokenizers.tokenizer.decode
        echoes = [
            Echo(given if isinstance(given, str) else decode(ids), ids)
            for given, ids in zip(ask.prompt, prompts, strict=True)
        ]
        return [echo for echo in echoes for _ in range(ask.n)]

    async def _parse(self, request: web.Request, cls: type[S]) -> S:
        def check(ask: S) -> None:
            self._serving.check_model(ask.model)
            ask.check(self._tokenizers.tokenizer.vocab_size)

        ask = await self._serving.parse(request, cls, check)
        await self._serving.check_constraint(ask.constraint)
        return ask

    def _head(self, id_: str) -> AnswerHead:
        return AnswerHead(id_, self._serving.seconds(), self._serving.model, self._fingerprint)

    def _card(self) -> dict[str, object]:
        return {
            "id": self._serving.model,
            "object": "model",
            "created": self._started,
            "owned_by": "galley",
            "max_model_len": self._tokenizers.max_model_len,
        }
