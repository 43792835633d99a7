"""/v1/responses: text in, text out, and a stream of named events. Knows nothing of templates and routing."""

from collections.abc import Callable, Iterable, Sequence

from aiohttp import web

from common.errors import GalleyError, InvalidRequest
from services.gateway.http.headers import wants_timing
from services.gateway.http.serving import Serving
from services.gateway.http.sse import named_event
from services.gateway.openai.answers import Body, WholeChoice, galley_body
from services.gateway.openai.response_events import Ending, ResponseEvents, ResponseObject
from services.gateway.openai.responses import ResponsesRequest
from services.gateway.reply import Batch, Reply


class ResponseNarrator:
    """Tells of one response; `seconds` is the clock for its end."""

    def __init__(self, response: ResponseObject, seconds: Callable[[], int], *, timing: bool) -> None:
        self._response = response
        self._events = ResponseEvents(response)
        self._seconds = seconds
        self._timing = timing
        self._begun = False
        self._texts: list[str] = []
        self._finish = ""

    def whole(self, choices: Sequence[WholeChoice], reply: Reply) -> Body:
        [choice] = choices
        ending = Ending(choice.text, choice.finish, reply.usage, self._seconds())
        return self._response.ended(ending) | galley_body(reply.timing, wanted=self._timing)

    def tell(self, batch: Batch, _reply: Reply, /) -> list[bytes]:
        bodies = [] if self._begun else list(self._events.begin())
        self._begun = True
        for delta in batch:
            self._finish = delta.finish or self._finish
            if delta.text:
                self._texts.append(delta.text)
                bodies.append(self._events.delta(delta.text))
        return _encoded(bodies)

    def end(self, reply: Reply) -> list[bytes]:
        ending = Ending("".join(self._texts), self._finish, reply.usage, self._seconds())
        return _encoded(self._events.end(ending, galley_body(reply.timing, wanted=self._timing)))

    def fail(self, error: GalleyError) -> list[bytes]:
        return _encoded(self._events.fail(error))


class ResponsesApi:
    """The handler over one gateway."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    def routes(self) -> list[web.RouteDef]:
        return [web.post("/v1/responses", self.respond)]

    async def respond(self, request: web.Request) -> web.StreamResponse:
        serving = self._serving

        def check(ask: ResponsesRequest) -> None:
            serving.check_model(ask.model)
            ask.check(serving.tokenizers.tokenizer.vocab_size)

        with serving.counting_refusals():
            timing = wants_timing(request.headers)
            ask = await serving.parse(request, ResponsesRequest, check)
            await serving.check_constraint(ask.constraint)
            try:
                prompt = await serving.tokenizers.encode_chat([m.for_template() for m in ask.chat.messages])
            except InvalidRequest as error:
                error.param = "input"
                raise
            generation = serving.generation(request, ask.chat, [prompt], "input")
        response = ResponseObject(ask, generation.request, serving.seconds())
        narrator = ResponseNarrator(response, serving.seconds, timing=timing)
        return await serving.answer(request, generation, narrator, stream=ask.stream)


def _encoded(bodies: Iterable[Body]) -> list[bytes]:
    return [named_event(str(body["type"]), body) for body in bodies]
