"""Answers of /v1/responses: the response object, and the events that tell of its making.

Pure: text in, JSON-able dicts out. Knows nothing of SSE and HTTP.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from common.errors import GalleyError
from services.gateway.openai.answers import Body
from services.gateway.openai.responses import ResponsesRequest
from services.gateway.request import Usage


@dataclass(frozen=True, slots=True)
class Ending:
    """How a response ended; `completed_at` is in seconds since the epoch."""

    text: str
    finish: str
    usage: Usage
    completed_at: int

    @property
    def status(self) -> str:
        return "incomplete" if self.finish == "length" else "completed"


class ResponseObject:
    """One response, as it stands at each moment. `id` ends its own id and that of its only message."""

    def __init__(self, ask: ResponsesRequest, id_: str, created: int) -> None:
        self.item_id = f"msg_{id_}"
        self._ask = ask
        self._id = f"resp_{id_}"
        self._created = created

    def begun(self) -> Body:
        return self._body("in_progress", [])

    def ended(self, ending: Ending) -> Body:
        body = self._body(ending.status, [self.item(ending.status, [text_part(ending.text)])])
        if ending.status == "incomplete":
            body["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            body["completed_at"] = ending.completed_at
        return body | {"usage": usage_body(ending.usage)}

    def failed(self, error: GalleyError) -> Body:
        known = {"code": "server_error", "message": error.message, "param": error.param, "type": error.type}
        return self._body("failed", []) | {"error": known}

    def item(self, status: str, content: list[Body]) -> Body:
        return {
            "id": self.item_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }

    def _body(self, status: str, output: list[Body]) -> Body:
        ask = self._ask
        asked = ask.text and ask.text.format
        shown = asked.model_dump(by_alias=True, exclude_none=True, exclude_defaults=True) if asked else None
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "completed_at": None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": ask.model,
            "instructions": ask.instructions,
            "output": output,
            "max_output_tokens": ask.max_output_tokens,
            "temperature": ask.temperature,
            "top_p": ask.top_p,
            "text": {"format": shown or {"type": "text"}},
            "metadata": ask.metadata,
            "user": ask.user,
            "usage": None,
            "background": False,
            "parallel_tool_calls": ask.parallel_tool_calls,
            "previous_response_id": None,
            "service_tier": "default",
            "store": False,
            "tool_choice": ask.tool_choice,
            "tools": [],
            "top_logprobs": 0,
            "truncation": "disabled",
        }


class ResponseEvents:
    """The events of one stream, numbered from 0:

    | method | events                                                                                        |
    |--------|-----------------------------------------------------------------------------------------------|
    | begin  | response.created, response.in_progress, output_item.added, content_part.added                 |
    | delta  | output_text.delta                                                                             |
    | end    | output_text.done, content_part.done, output_item.done, response.completed (or .incomplete)    |
    | fail   | error, response.failed                                                                        |
    """

    def __init__(self, response: ResponseObject) -> None:
        self._response = response
        self._number = 0

    def begin(self) -> Iterator[Body]:
        yield self._event("response.created", response=self._response.begun())
        yield self._event("response.in_progress", response=self._response.begun())
        item = self._response.item("in_progress", [])
        yield self._event("response.output_item.added", output_index=0, item=item)
        yield self._part("response.content_part.added", part=text_part(""))

    def delta(self, text: str) -> Body:
        return self._part("response.output_text.delta", delta=text, logprobs=[])

    def end(self, ending: Ending, extra: Body) -> Iterator[Body]:
        """`extra` goes into the response object of the last event."""
        part = text_part(ending.text)
        yield self._part("response.output_text.done", text=ending.text, logprobs=[])
        yield self._part("response.content_part.done", part=part)
        item = self._response.item(ending.status, [part])
        yield self._event("response.output_item.done", output_index=0, item=item)
        yield self._event(f"response.{ending.status}", response=self._response.ended(ending) | extra)

    def fail(self, error: GalleyError) -> Iterator[Body]:
        yield self._event("error", code=error.code, message=error.message, param=error.param)
        yield self._event("response.failed", response=self._response.failed(error))

    def _part(self, kind: str, **fields: object) -> Body:
        where = {"item_id": self._response.item_id, "output_index": 0, "content_index": 0}
        return self._event(kind, **where, **fields)

    def _event(self, kind: str, **fields: object) -> Body:
        number, self._number = self._number, self._number + 1
        return {"type": kind, "sequence_number": number, **fields}


def text_part(text: str) -> Body:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def usage_body(usage: Usage) -> Body:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
