"""What a client asked for, once validated and tokenized, and what it gets back: plain data.

Knows nothing of HTTP, JSON shapes and tokenizers.
"""

from dataclasses import dataclass

from common.ids import RequestId
from common.messages.generation import SLO, SamplingParams
from common.messages.stream import FinishReason, TokenLogprobs


@dataclass(frozen=True, slots=True)
class ChoiceSpec:
    """One choice to generate. `prompt` numbers the client's prompts; n choices of one prompt share it."""

    prompt: int
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class Generation:
    """One client request. Choice i of the answer is `choices[i]`.

    `stop` are strings that end the text, shown with `include_stop` only. `client_id` is the client's own
    X-Request-Id, a label only.
    """

    request: RequestId
    choices: tuple[ChoiceSpec, ...]
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    priority: int = 0
    cache_salt: str = ""
    slo: SLO | None = None
    client_id: str = ""


@dataclass(frozen=True, slots=True)
class Token:
    """One token as a client may see it."""

    id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new of one choice; `finish` is set on its last one, and only there.

    `text` and `tokens` need not belong together: text that may still become a stop string or half a
    character comes later than its token. The token that ended the choice (EOS, stop id) is in neither.
    `prompt` has the log probabilities of all prompt tokens but the first, and a delta of its own, the first.
    """

    choice: int
    text: str
    tokens: tuple[Token, ...]
    finish: FinishReason | None = None
    prompt: tuple[TokenLogprobs, ...] = ()

    @property
    def num_bytes(self) -> int:
        """About what it takes in memory: each number, pair and object of it some 128 bytes."""
        scores = [*self.prompt, *(token.logprobs for token in self.tokens if token.logprobs)]
        objects = 1 + len(self.tokens) + len(self.prompt) + sum(len(score.top) for score in scores)
        return 128 * objects + len(self.text)


@dataclass(frozen=True, slots=True)
class Timing:
    """Where a request's time went and who served it; None where it has not come to that.

    Times are in milliseconds. Queue, prefill and transfer are the workers' own account of the first choice's
    last attempt; TTFT and TPOT are the gateway's, of the whole request.
    """

    queue_ms: float | None = None
    prefill_ms: float | None = None
    transfer_ms: float | None = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    prefill: str | None = None
    decode: str | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts. Each prompt counts once, an ending EOS counts; `cached_tokens` were prefill's hits."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
