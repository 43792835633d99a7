"""What the gateway asks for: routes, jobs and aborts, and how they are answered.

Plain data. Prompt and output travel apart: whatever a worker needs to go on with a request (penalties,
limits, positions) is rebuilt from (prompt_ids, output_ids). Times are durations in seconds, because
clocks of two machines differ. Knows nothing of transports.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from common.ids import AttemptKey, InstanceId, InstanceRef


@dataclass(frozen=True, slots=True)
class SLO:
    """Latency budget of one request: seconds to the first token, seconds per later token; None: no budget."""

    ttft_s: float | None = None
    tpot_s: float | None = None


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen; all values are validated at the gateway.

    `max_tokens` and `min_tokens` count output tokens from the start of the request, not of the attempt.
    `logprobs` is None for none, else how many of the best alternatives to report (0: only the chosen).
    `logit_bias` and `stop_token_ids` name token ids. `seed` is always set: the gateway draws one.
    `grammar` is what the output must follow, as llguidance's grammar JSON; "" for anything.
    `prompt_logprobs` is to the prompt what `logprobs` is to the output. With `max_tokens` 0 only they are
    wanted: a worker, which knows no step without a sample, reports a token that nobody takes.
    """

    max_tokens: int
    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    grammar: str = ""
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """Gateway -> `route`: who should take this request? `exclude` lists incarnations that just failed it.

    `block_hashes` names the full blocks of its tokens (block_hash.pack), for policies that look at cached
    prefixes; "" where the gateway leaves them out.
    """

    KIND: ClassVar[str] = "route"
    key: AttemptKey
    gateway: InstanceId
    prompt_tokens: int
    max_tokens: int
    exclude: tuple[InstanceRef, ...] = ()
    slo: SLO | None = None
    block_hashes: str = ""


@dataclass(frozen=True, slots=True)
class Route:
    """Answer to RouteRequest.

    `worker` gets the job. With `decode` set, worker is a prefill instance and `decode` the fallback for
    the moments when no router answers; with `decode` None, worker is a decode instance that prefills
    locally.
    """

    KIND: ClassVar[str] = "route.ok"
    worker: InstanceRef
    decode: InstanceRef | None


@dataclass(frozen=True, slots=True)
class Rejected:
    """Answer to a route request that nobody can take; the fields of the client's error."""

    KIND: ClassVar[str] = "route.rejected"
    reason: Literal["no_prefill", "no_decode", "overloaded", "too_long"]
    message: str
    retry_after_s: float


@dataclass(frozen=True, slots=True)
class DecodeRouteRequest:
    """Prefill -> `route.decode`, when it starts a request: which decode should pull its KV?"""

    KIND: ClassVar[str] = "route.decode"
    key: AttemptKey
    prefill: InstanceRef
    num_tokens: int
    max_tokens: int
    exclude: tuple[InstanceRef, ...] = ()


@dataclass(frozen=True, slots=True)
class DecodeRoute:
    """Answer to DecodeRouteRequest."""

    KIND: ClassVar[str] = "route.decode.ok"
    decode: InstanceRef


@dataclass(frozen=True, slots=True)
class Job:
    """Gateway -> `job.<instance>`: compute this attempt. Idempotent by `key`.

    With `decode` set the receiver is a prefill: it computes prompt_ids + output_ids, samples one token and
    hands the rest to a decode (`decode` is the fallback). With `decode` None the receiver does all of it.
    `age_s` is the time since the request arrived at the gateway, `time_left_s` until its deadline.
    `worker` is the incarnation meant; any other refuses (stale).
    """

    KIND: ClassVar[str] = "job"
    key: AttemptKey
    gateway: InstanceId
    worker: InstanceRef
    decode: InstanceRef | None
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    sampling: SamplingParams
    time_left_s: float
    age_s: float
    priority: int = 0
    cache_salt: str = ""
    slo: SLO | None = None


@dataclass(frozen=True, slots=True)
class Accepted:
    """The receiver has the job, handoff or abort (again: all are idempotent)."""

    KIND: ClassVar[str] = "accepted"


@dataclass(frozen=True, slots=True)
class Refused:
    """The receiver does not take it; nothing is held for it.

    full: no room, try another instance. draining: going away. stale: another incarnation was meant.
    aborted: an abort for this attempt or a later one came first. mismatch: layout or weights differ.
    invalid: it can never work here (too long for the pool, say).
    """

    KIND: ClassVar[str] = "refused"
    reason: Literal["full", "draining", "stale", "aborted", "mismatch", "invalid"]
    message: str


AbortReason = Literal[
    "client",
    "slow_reader",
    "deadline",
    "shutdown",
    "internal",
    "stop",
    "superseded",
    "rebound",
    "not_owned",
    "gateway_dead",
]
"""client, slow_reader: it left, or does not read. shutdown, internal: the gateway's own end, or a bug in it.
stop: a stop string. superseded: another attempt runs, or none will. rebound: another decode pulls the KV.
not_owned: the gateway does not know the request. gateway_dead: a worker has not heard of its gateway."""


@dataclass(frozen=True, slots=True)
class Abort:
    """-> `abort.<instance>`, a request repeated until answered: end this attempt and free all it holds.

    Remembered for `time_left_s` where unknown, so that an abort that overtakes its job still wins: it
    refuses `key.attempt` and earlier attempts of that (request, choice).
    """

    KIND: ClassVar[str] = "abort"
    key: AttemptKey
    time_left_s: float
    reason: AbortReason
