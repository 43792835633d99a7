"""/tokenize and /detokenize: the model's tokenizer over HTTP. Knows nothing of generating."""

from aiohttp import web

from common.observability.http import json_response
from services.gateway.http.serving import Serving
from services.gateway.openai.tokens import DetokenizeRequest, TokenizeRequest
from services.gateway.tokenizing import ChatStyle


class TokensApi:
    """Handlers over one tokenizer; only a text that can never fit the model is refused for its length."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._tokenizers = serving.tokenizers

    def routes(self) -> list[web.RouteDef]:
        return [web.post("/tokenize", self.tokenize), web.post("/detokenize", self.detokenize)]

    async def tokenize(self, request: web.Request) -> web.Response:
        def check(ask: TokenizeRequest) -> None:
            self._serving.check_model(self._serving.model if ask.model is None else ask.model)
            ask.check()

        with self._serving.counting_refusals():
            ask = await self._serving.parse(request, TokenizeRequest, check)
            tokens = await self._tokens(ask)
            pieces = {"token_strs": await self._tokenizers.pieces(tokens)} if ask.return_token_strs else {}
        limit = self._tokenizers.max_model_len
        return json_response({"count": len(tokens), "max_model_len": limit, "tokens": tokens, **pieces})

    async def _tokens(self, ask: TokenizeRequest) -> list[int]:
        if ask.messages is not None:
            messages = [one.for_template() for one in ask.messages]
            special = bool(ask.add_special_tokens)
            style = ChatStyle(ask.add_generation_prompt, ask.continue_final_message, special)
            return await self._tokenizers.encode_chat(messages, style)
        special = ask.add_special_tokens is not False
        [tokens] = await self._tokenizers.encode([ask.prompt or ""], add_special_tokens=special)
        return tokens

    async def detokenize(self, request: web.Request) -> web.Response:
        def check(ask: DetokenizeRequest) -> None:
            self._serving.check_model(self._serving.model if ask.model is None else ask.model)
            ask.check(self._tokenizers.tokenizer.vocab_size)

        with self._serving.counting_refusals():
            ask = await self._serving.parse(request, DetokenizeRequest, check)
            prompt = await self._tokenizers.spell(ask.tokens)
        return json_response({"prompt": prompt})
