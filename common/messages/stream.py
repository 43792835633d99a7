"""What workers tell a gateway about its requests: numbered frames of items, and their repair.

Frames are numbered from 1 per (worker incarnation, gateway); a gap is asked for again with Resend, and
the gateway's beat acknowledges what it has (cluster.GatewayBeat), which is when the worker forgets it.
Every token carries its index in the request's output, so order and repeats are the receiver's to sort
out. Plain data.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from common.ids import AttemptKey, Incarnation, InstanceId, InstanceRef

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log probabilities of one token: its own and the best alternatives', best first.

    All of them are numbers that JSON can say: whoever computes them puts a very low one for log 0.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class PrefillStats:
    """How the prompt was computed; rides on the first token of an attempt. Milliseconds."""

    cached_tokens: int
    queue_ms: float
    prefill_ms: float


@dataclass(frozen=True, slots=True)
class TokensItem:
    """Output tokens `index`, `index`+1, ...; index counts from the request's first output token."""

    KIND: ClassVar[str] = "tokens"
    key: AttemptKey
    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    prefill: PrefillStats | None = None


@dataclass(frozen=True, slots=True)
class PromptItem:
    """Log probabilities of prompt tokens `index`, `index`+1, ...; the first token, index 0, has none."""

    KIND: ClassVar[str] = "prompt"
    key: AttemptKey
    index: int
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class BoundItem:
    """Prefill started this attempt; `decode` is going to pull it (None: it finishes here)."""

    KIND: ClassVar[str] = "bound"
    key: AttemptKey
    decode: InstanceRef | None


@dataclass(frozen=True, slots=True)
class DecodingItem:
    """Decode holds all KV and FINAL: from here on it owns the attempt and prefill's death does not matter.

    `transfer_ms` is what the request waited for its KV after prefill was done.
    """

    KIND: ClassVar[str] = "decoding"
    key: AttemptKey
    transfer_ms: float
    transfer_bytes: int


@dataclass(frozen=True, slots=True)
class FinishItem:
    """The choice is complete with `num_tokens` output tokens in all.

    With reason "stop", `stop_token` is the last of them: an EOS, a stop id, or what completed the grammar.
    """

    KIND: ClassVar[str] = "finish"
    key: AttemptKey
    reason: FinishReason
    num_tokens: int
    stop_token: int | None = None


@dataclass(frozen=True, slots=True)
class FailedItem:
    """The worker gave this attempt up and holds nothing of it any more."""

    KIND: ClassVar[str] = "failed"
    key: AttemptKey
    code: str
    message: str
    retryable: bool


FrameItem = TokensItem | PromptItem | BoundItem | DecodingItem | FinishItem | FailedItem


@dataclass(frozen=True, slots=True)
class Frame:
    """Worker -> `stream.<gateway>`: what one step has for that gateway, or as much of it as fits."""

    KIND: ClassVar[str] = "frame"
    instance: InstanceId
    incarnation: Incarnation
    number: int
    items: tuple[FrameItem, ...]


@dataclass(frozen=True, slots=True)
class Resend:
    """Gateway -> `resend.<instance>`: publish these frame numbers again; `incarnation` must match."""

    KIND: ClassVar[str] = "resend"
    gateway: InstanceId
    incarnation: Incarnation
    numbers: tuple[int, ...]
