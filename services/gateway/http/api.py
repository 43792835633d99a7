"""The OpenAI endpoints: a body in, tokens asked of the gateway, an answer or a stream out.

Knows nothing of routing, workers and retries.
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import TypeVar

from aiohttp import web

from common.clock import Clock
from common.errors import GalleyError, InvalidRequest, ModelNotFound
from common.observability.http import add_probes, json_response
from services.gateway.gateway import Gateway
from services.gateway.http.middleware import LABEL, label_requests, read_body
from services.gateway.http.sse import EventStream, event
from services.gateway.openai.answers import (
    AnswerHead,
    ChatShape,
    CompletionShape,
    Shape,
    error_body,
    gather,
)
from services.gateway.openai.base import parse_body
from services.gateway.openai.chat import ChatRequest
from services.gateway.openai.completions import CompletionRequest
from services.gateway.openai.sampling import SamplingFields
from services.gateway.reply import Batch, Reply
from services.gateway.request import ChoiceSpec, Generation
from services.gateway.tokenizing import TokenizerPool, too_long

S = TypeVar("S", bound=SamplingFields)

PARSE_INLINE = 128 * 1024
"""Bytes of body that are parsed and checked on the event loop; longer ones would hold it for too long."""


def make_app(
    gateway: Gateway, tokenizers: TokenizerPool, clock: Clock, *, max_body_bytes: int
) -> web.Application:
    """The OpenAI endpoints and the probes, behind one middleware."""
    app = web.Application(client_max_size=max_body_bytes, middlewares=[label_requests(gateway.ids)])
    app.add_routes(OpenAIApi(gateway, tokenizers, clock).routes())
    add_probes(app, gateway.metrics, gateway.why_not_ready)
    return app


class OpenAIApi:
    """Handlers over one gateway."""

    def __init__(self, gateway: Gateway, tokenizers: TokenizerPool, clock: Clock) -> None:
        self._gateway = gateway
        self._tokenizers = tokenizers
        self._clock = clock
        self._model = gateway.vocabulary.model
        self._started = int(clock.wall())
        self._fingerprint = "fp_" + blake2b(self._model.encode(), digest_size=5).hexdigest()

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
        self._check_model(request.match_info["model"])
        return json_response(self._card())

    async def chat(self, request: web.Request) -> web.StreamResponse:
        with self._counting_refusals():
            ask = await self._parse(request, ChatRequest)
            messages = [message.for_template() for message in ask.messages]
            prompt_ids = await self._tokenizers.encode_chat(messages)
            generation = self._generation(request, ask, [prompt_ids], "messages")
        head = self._head(f"chatcmpl-{generation.request}")
        bytes_of = self._tokenizers.tokenizer.bytes_of
        shape = ChatShape(head, bytes_of, logprobs=ask.logprobs, token_ids=ask.return_token_ids)
        return await self._answer(request, ask, generation, shape)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        with self._counting_refusals():
            ask = await self._parse(request, CompletionRequest)
            texts = [prompt for prompt in ask.prompt if isinstance(prompt, str)]
            encoded = iter(await self._tokenizers.encode(texts) if texts else [])
            prompts = [next(encoded) if isinstance(prompt, str) else prompt for prompt in ask.prompt]
            generation = self._generation(request, ask, prompts, "prompt")
        shape = CompletionShape(
            self._head(f"cmpl-{generation.request}"),
            self._tokenizers.tokenizer.bytes_of,
            logprobs=ask.logprobs is not None,
            token_ids=ask.return_token_ids,
        )
        return await self._answer(request, ask, generation, shape)

    @contextmanager
    def _counting_refusals(self) -> Iterator[None]:
        """Count what never becomes a request of the gateway's; those count themselves."""
        try:
            yield
        except (GalleyError, web.HTTPException):
            self._gateway.metrics.requests("rejected").inc()
            raise

    # --- from a body to a generation --------------------------------------------------------------

    async def _parse(self, request: web.Request, cls: type[S]) -> S:
        body = await read_body(request)

        def parse() -> S:
            ask = parse_body(body, cls)
            self._check_model(ask.model)
            ask.check(self._tokenizers.tokenizer.vocab_size)
            return ask

        ask = parse() if len(body) <= PARSE_INLINE else await asyncio.to_thread(parse)
        if ask.constraint is not None:
            await self._tokenizers.check_grammar(ask.constraint.grammar, ask.constraint.param)
        return ask

    def _check_model(self, name: str) -> None:
        if name != self._model:
            raise ModelNotFound(f"there is no model {name[:200]!r}; this is {self._model!r}", param="model")

    def _generation(
        self, request: web.Request, ask: SamplingFields, prompts: Sequence[Sequence[int]], param: str
    ) -> Generation:
        limit = self._tokenizers.max_model_len
        choices: list[ChoiceSpec] = []
        for number, prompt_ids in enumerate(prompts):
            if not prompt_ids:
                raise InvalidRequest(f"{param}: there is nothing to start from", param=param)
            room = limit - len(prompt_ids)
            if room < 1:
                raise too_long(f"{len(prompt_ids)} tokens", limit, param)
            sampling = ask.sampling(room, self._gateway.ids.uint63)
            choices += [ChoiceSpec(number, tuple(prompt_ids), sampling)] * ask.n
        return Generation(
            request=self._gateway.new_request_id(),
            choices=tuple(choices),
            stop=ask.stop,
            include_stop=ask.include_stop_str_in_output,
            priority=ask.priority,
            cache_salt=ask.cache_salt,
            client_id=request[LABEL],
        )

    # --- from a reply to an answer ----------------------------------------------------------------

    async def _answer(
        self, request: web.Request, ask: SamplingFields, generation: Generation, shape: Shape
    ) -> web.StreamResponse:
        with self._counting_refusals():
            reply = self._gateway.submit(generation)
        try:
            if ask.stream:
                return await self._stream(request, ask, reply, shape)
            deltas = [delta async for batch in reply for delta in batch]
            choices = gather(deltas, len(generation.choices))
            return json_response(shape.whole(choices, reply.usage))
        finally:
            reply.close()

    async def _stream(
        self, request: web.Request, ask: SamplingFields, reply: Reply, shape: Shape
    ) -> web.StreamResponse:
        """The first batch decides between an HTTP error and a stream; later errors are events."""
        first = await anext(reply)
        stream = EventStream(request, {"X-Request-Id": request[LABEL]})
        reply.on_lost = stream.cut
        try:
            await stream.begin()
            await stream.write(self._events(first, ask, reply, shape))
            await stream.end(await self._rest(ask, reply, shape, stream))
        except ConnectionError:
            pass  # the client is gone; the caller closes the reply, which aborts what runs for it
        return stream.response

    async def _rest(
        self, ask: SamplingFields, reply: Reply, shape: Shape, stream: EventStream
    ) -> list[bytes]:
        """Send all batches but the first; gives the events that close the stream."""
        try:
            async for batch in reply:
                await stream.write(self._events(batch, ask, reply, shape))
        except GalleyError as error:
            return [event(error_body(error))]
        return [event(shape.usage_chunk(reply.usage))] if ask.include_usage else []

    def _events(self, batch: Batch, ask: SamplingFields, reply: Reply, shape: Shape) -> list[bytes]:
        chunks = [chunk for delta in batch for chunk in shape.chunks(delta)]
        if ask.continuous_usage and chunks:
            chunks[-1]["usage"] = shape.usage_chunk(reply.usage)["usage"]
        return [event(chunk) for chunk in chunks]

    def _head(self, id_: str) -> AnswerHead:
        return AnswerHead(id_, int(self._clock.wall()), self._model, self._fingerprint)

    def _card(self) -> dict[str, object]:
        return {
            "id": self._model,
            "object": "model",
            "created": self._started,
            "owned_by": "galley",
            "max_model_len": self._tokenizers.max_model_len,
        }
