"""What all endpoints that generate have in common: a body in, tokens asked of the gateway, an answer out.

Each endpoint brings the class of its body and a `Narrator`, which says what happens in its own way. Knows
nothing of routing, workers and retries.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeVar

from aiohttp import web
from pydantic import BaseModel

from common.clock import Clock
from common.errors import GalleyError, InvalidRequest, ModelNotFound
from common.observability.http import json_response
from services.gateway.gateway import Gateway
from services.gateway.http.headers import slo_of
from services.gateway.http.middleware import INLINE_BYTES, LABEL, read_body
from services.gateway.http.sse import EventStream
from services.gateway.openai.answers import Body, WholeChoice, gather
from services.gateway.openai.base import parse_body
from services.gateway.openai.sampling import SamplingFields
from services.gateway.openai.structured import Constraint
from services.gateway.reply import Batch, Reply
from services.gateway.request import ChoiceSpec, Generation
from services.gateway.tokenizing import TokenizerPool, too_long

R = TypeVar("R", bound=BaseModel)

INLINE_TELLING = 128 * 1024
"""Batches up to this many bytes are told on the event loop; that takes some ms at most."""


class Narrator(Protocol):
    """Says what becomes of one request, as a whole body or as the events of a stream."""

    def whole(self, choices: Sequence[WholeChoice], reply: Reply) -> Body: ...

    def tell(self, batch: Batch, reply: Reply, /) -> list[bytes]:
        """Events for what is new; with the first batch, also those that open the stream."""
        ...

    def end(self, reply: Reply) -> list[bytes]:
        """Events that close a stream that went well."""
        ...

    def fail(self, error: GalleyError) -> list[bytes]:
        """Events that close a stream that did not."""
        ...


class Serving:
    """The way of every generating request through one gateway."""

    def __init__(self, gateway: Gateway, tokenizers: TokenizerPool, clock: Clock) -> None:
        self.gateway = gateway
        self.tokenizers = tokenizers
        self.model = gateway.vocabulary.model
        self._clock = clock

    def seconds(self) -> int:
        """Now, in seconds since the epoch."""
        return int(self._clock.wall())

    @contextmanager
    def counting_refusals(self) -> Iterator[None]:
        """Count what never becomes a request of the gateway's; those count themselves."""
        try:
            yield
        except (GalleyError, web.HTTPException):
            self.gateway.metrics.requests("rejected").inc()
            raise

    async def parse(self, request: web.Request, cls: type[R], check: Callable[[R], None]) -> R:
        """The body of `request`, once `check` has nothing against it. Raises GalleyError."""
        body = await read_body(request)

        def parse() -> R:
            ask = parse_body(body, cls)
            check(ask)
            return ask

        return parse() if len(body) <= INLINE_BYTES else await asyncio.to_thread(parse)

    async def check_constraint(self, constraint: Constraint | None) -> None:
        """Raises InvalidRequest when the model cannot follow it."""
        if constraint is not None:
            await self.tokenizers.check_grammar(constraint.grammar, constraint.param)

    def check_model(self, name: str) -> None:
        if name != self.model:
            raise ModelNotFound(f"there is no model {name[:200]!r}; this is {self.model!r}", param="model")

    def generation(
        self, request: web.Request, ask: SamplingFields, prompts: Sequence[Sequence[int]], param: str
    ) -> Generation:
        """`ask.n` choices of each prompt; `param` is the field they came in. Raises InvalidRequest."""
        limit = self.tokenizers.max_model_len
        choices: list[ChoiceSpec] = []
        for number, prompt_ids in enumerate(prompts):
            if not prompt_ids:
                raise InvalidRequest(f"{param}: there is nothing to start from", param=param)
            room = limit - len(prompt_ids)
            if room < 1:
                raise too_long(f"{len(prompt_ids)} tokens", limit, param)
            sampling = ask.sampling(room, self.gateway.ids.uint63)
            choices += [ChoiceSpec(number, tuple(prompt_ids), sampling)] * ask.n
        return Generation(
            request=self.gateway.new_request_id(),
            choices=tuple(choices),
            stop=ask.stop,
            include_stop=ask.include_stop_str_in_output,
            priority=ask.priority,
            cache_salt=ask.cache_salt,
            slo=slo_of(request.headers, self.gateway.default_slo),
            client_id=request[LABEL],
        )

    async def answer(
        self, request: web.Request, generation: Generation, narrator: Narrator, *, stream: bool
    ) -> web.StreamResponse:
        with self.counting_refusals():
            reply = self.gateway.submit(generation)
        try:
            if stream:
                scored = any(spec.sampling.prompt_logprobs is not None for spec in generation.choices)
                return await _stream(request, reply, narrator, scored=scored)
            deltas = [delta async for batch in reply for delta in batch]

            def whole() -> web.Response:
                return json_response(narrator.whole(gather(deltas, len(generation.choices)), reply))

            return await asyncio.to_thread(whole)  # log probabilities of a long answer take part of a second
        finally:
            reply.close()


async def _stream(
    request: web.Request, reply: Reply, narrator: Narrator, *, scored: bool
) -> web.StreamResponse:
    """The first batch decides between an HTTP error and a stream; later errors are events.

    With `scored` prompts, a batch may be too much for the event loop: nothing is pushed.
    """
    stream = EventStream(request, {"X-Request-Id": request[LABEL]})
    first = await anext(reply)

    def push(batch: Batch) -> bool:
        if not stream.free:
            return False
        stream.send(narrator.tell(batch, reply))
        return True

    reply.on_lost = stream.cut
    try:
        await stream.begin()
        await _tell(first, reply, narrator, stream)
        if not scored:
            reply.push = push
        await stream.end(await _rest(reply, narrator, stream))
    except ConnectionError:
        pass  # the client is gone; the caller closes the reply, which aborts what runs for it
    return stream.response


async def _rest(reply: Reply, narrator: Narrator, stream: EventStream) -> list[bytes]:
    """Send all batches but the first; gives the events that close the stream."""
    try:
        async for batch in reply:
            await _tell(batch, reply, narrator, stream)
    except GalleyError as error:
        return narrator.fail(error)
    return narrator.end(reply)


async def _tell(batch: Batch, reply: Reply, narrator: Narrator, stream: EventStream) -> None:
    """Send a batch; a large one (a scored prompt, what a client left unread) is told in a thread."""
    if sum(delta.num_bytes for delta in batch) <= INLINE_TELLING:
        await stream.write(narrator.tell(batch, reply))
    else:
        await stream.write_made(asyncio.to_thread(narrator.tell, batch, reply))
