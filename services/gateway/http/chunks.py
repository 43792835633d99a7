"""How chat and completions tell what happens: `data:` lines with chunks, [DONE] at the end.

Knows nothing of where deltas come from.
"""

from collections.abc import Sequence

from common.errors import GalleyError
from services.gateway.http.sse import DONE, event
from services.gateway.openai.answers import Body, Shape, WholeChoice, error_body, galley_body
from services.gateway.openai.sampling import SamplingFields
from services.gateway.reply import Batch, Reply


class ChunkNarrator:
    """For one request of `num_choices` choices; with `timing`, the last chunk has a `galley` object."""

    def __init__(self, ask: SamplingFields, shape: Shape, num_choices: int, *, timing: bool) -> None:
        self._ask = ask
        self._shape = shape
        self._unfinished = num_choices
        self._timing = timing

    def whole(self, choices: Sequence[WholeChoice], reply: Reply) -> Body:
        return self._shape.whole(choices, reply.usage) | galley_body(reply.timing, wanted=self._timing)

    def tell(self, batch: Batch, reply: Reply) -> list[bytes]:
        chunks = [chunk for delta in batch for chunk in self._shape.chunks(delta)]
        for delta in batch:
            if delta.finish is not None:
                self._unfinished -= 1
        if self._ask.continuous_usage and chunks:
            usage = self._shape.usage_chunk(reply.usage)["usage"]
            for chunk in chunks:
                chunk["usage"] = usage
        if chunks and not self._unfinished and not self._ask.include_usage:
            chunks[-1] |= galley_body(reply.timing, wanted=self._timing)
        return [event(chunk) for chunk in chunks]

    def end(self, reply: Reply) -> list[bytes]:
        usage = self._shape.usage_chunk(reply.usage) | galley_body(reply.timing, wanted=self._timing)
        return [event(usage), DONE] if self._ask.include_usage else [DONE]

    def fail(self, error: GalleyError) -> list[bytes]:
        return [event(error_body(error)), DONE]
