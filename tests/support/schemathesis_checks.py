"""A hook of schemathesis: every answer with 200 is read by the types of the official openai package.

Loaded by schemathesis itself (SCHEMATHESIS_HOOKS), whose own checks come on top. Knows nothing of pytest.
"""

import json
from collections.abc import Callable
from typing import Any, Final

import schemathesis
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

Read = Callable[[Any], object]

_MODEL: Final[Read] = TypeAdapter(Model).validate_python

WHOLE: Final[dict[str, Read]] = {
    "/v1/chat/completions": TypeAdapter(ChatCompletion).validate_python,
    "/v1/completions": TypeAdapter(Completion).validate_python,
    "/v1/responses": TypeAdapter(Response).validate_python,
    "/v1/models": lambda body: [_MODEL(card) for card in body["data"]],
    "/v1/models/{model}": _MODEL,
}
EVENTS: Final[dict[str, Read]] = {
    "/v1/chat/completions": TypeAdapter(ChatCompletionChunk).validate_python,
    # A chunk of a completion has no finish reason before its last; the type says that it always has one.
    "/v1/completions": lambda body: Completion.model_validate(_finished(body)),
    "/v1/responses": TypeAdapter(ResponseStreamEvent).validate_python,
}


@schemathesis.check
def read_by_the_openai_package(ctx: Any, response: Any, case: Any) -> None:
    """Raises AssertionError or ValidationError, which schemathesis reports."""
    if response.status_code != 200 or case.path not in WHOLE:
        return
    if response.headers["content-type"][0].startswith("text/event-stream"):
        # Of a long stream schemathesis reads no more than the start.
        *events, rest = response.content.decode().split("\n\n")
        assert rest == ""
        for line in [line for event in events for line in event.split("\n")]:
            if line.startswith("data: ") and line != "data: [DONE]":
                EVENTS[case.path](json.loads(line.removeprefix("data: ")))
    else:
        WHOLE[case.path](json.loads(response.content))


def _finished(body: dict[str, Any]) -> dict[str, Any]:
    choices = [choice | {"finish_reason": choice["finish_reason"] or "stop"} for choice in body["choices"]]
    return body | {"choices": choices}
