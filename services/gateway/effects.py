"""What the request's owner wants done: instructions as plain data, carried out by whoever drives it."""

from dataclasses import dataclass

from common.errors import GalleyError
from common.ids import InstanceRef
from common.messages.generation import Abort, Job, RouteRequest
from common.messages.stream import FinishReason, PrefillStats, TokenLogprobs


@dataclass(frozen=True, slots=True)
class AskRoute:
    """Ask a router; answer with on_route or on_route_failed.

    The tokens are those by which cached prefixes can be found; none where the cache is passed by.
    """

    request: RouteRequest
    prompt_ids: tuple[int, ...] = ()
    output_ids: tuple[int, ...] = ()
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class SendJob:
    """Offer the job to its worker; answer with on_refused or on_job_lost, and nothing once it is accepted."""

    job: Job


@dataclass(frozen=True, slots=True)
class SendAbort:
    """Make sure that `target` ends the attempt; nothing is reported back."""

    target: InstanceRef
    abort: Abort


@dataclass(frozen=True, slots=True)
class EmitPrompt:
    """Log probabilities of a choice's prompt tokens but the first; before anything else of the choice."""

    choice: int
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class Emit:
    """New output tokens of a choice, in order, each once. `logprobs` is empty or as long as `token_ids`."""

    choice: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    prefill: PrefillStats | None = None


@dataclass(frozen=True, slots=True)
class Transferred:
    """The choice's KV is at its decode, which waited `transfer_ms` for it once prefill was done."""

    choice: int
    transfer_ms: float


@dataclass(frozen=True, slots=True)
class Finished:
    """The choice is complete; all its tokens were emitted before."""

    choice: int
    reason: FinishReason
    stop_token: int | None = None


@dataclass(frozen=True, slots=True)
class GaveUp:
    """The choice cannot be completed."""

    choice: int
    error: GalleyError


@dataclass(frozen=True, slots=True)
class Migrated:
    """A choice goes on elsewhere, for the log and the count; `num_tokens` of its output are kept."""

    choice: int
    cause: GalleyError
    num_tokens: int


Effect = AskRoute | SendJob | SendAbort | EmitPrompt | Emit | Transferred | Finished | GaveUp | Migrated
