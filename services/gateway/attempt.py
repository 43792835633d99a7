"""One try at one choice: on which worker it runs, whose death would end it, and whom the next try avoids.

Pure. Knows nothing of messages, tokens and how a route is found.
"""

from dataclasses import dataclass

from common.ids import AttemptKey, InstanceRef
from common.observability.timeline import Stage

STAGES: tuple[Stage, ...] = ("queued", "prefilling", "waiting_for_kv", "decoding")


@dataclass(slots=True)
class Attempt:
    """Where an attempt has got to:

    | state            | depends on        | next                                                        |
    |------------------|-------------------|-------------------------------------------------------------|
    | routing          | nobody            | offered, by `offer`                                         |
    | offered, running | worker and decode | `bound` names the decode; decoding, by `decodes_on`         |
    | decoding         | the decode alone  | the end                                                     |

    `worker` is None while routing. `decode` is None while unbound, and when the worker generates alone.
    """

    key: AttemptKey
    worker: InstanceRef | None = None
    decode: InstanceRef | None = None
    split: bool = False
    """Whether worker is a prefill that hands over."""
    started: bool = False
    has_token: bool = False
    decoding: bool = False

    def offer(self, worker: InstanceRef, *, split: bool) -> None:
        self.worker = worker
        self.split = split

    def bound(self, decode: InstanceRef | None) -> None:
        """Prefill started it; `decode` will pull, or it ends where it is (None)."""
        self.started = True
        if not self.decoding:
            self.decode = decode

    def decodes_on(self, source: InstanceRef) -> None:
        self.decode = source
        self.decoding = True

    @property
    def workers(self) -> tuple[InstanceRef, ...]:
        """Everybody who may hold something for it."""
        found = [ref for ref in (self.worker, self.decode) if ref is not None]
        return tuple(dict.fromkeys(found))

    def depends_on(self, ref: InstanceRef) -> bool:
        return ref == self.decode if self.decoding else ref in self.workers

    @property
    def stage(self) -> Stage:
        if self.decoding or (self.has_token and not self.split):
            return "decoding"
        if self.has_token:
            return "waiting_for_kv"
        return "prefilling" if self.started else "queued"


class Exclusions:
    """Whom one choice does not want to be routed to again: three lists of incarnations, as they were met.

    gone: dead, or another incarnation by now; never asked again. refused: full or draining. failed: did
    not answer, or gave the attempt up, perhaps by no fault of its own: let in again when nobody else is
    left, because a failure never blacklists.
    """

    def __init__(self) -> None:
        self._gone: dict[InstanceRef, None] = {}
        self._refused: dict[InstanceRef, None] = {}
        self._failed: dict[InstanceRef, None] = {}
        self.full = False
        """Whether somebody would have taken the choice but for want of room."""

    @property
    def refs(self) -> tuple[InstanceRef, ...]:
        return (*self._gone, *self._refused, *self._failed)

    def gone(self, ref: InstanceRef) -> None:
        self._gone[ref] = None
        self._failed.pop(ref, None)

    def refused(self, ref: InstanceRef, reason: str) -> None:
        match reason:
            case "stale":
                self.gone(ref)
            case "aborted":
                self.failed(ref)  # it refuses that attempt, not the next
            case _:
                self.full = self.full or reason == "full"
                self._refused[ref] = None

    def failed(self, ref: InstanceRef) -> None:
        if ref not in self._gone:
            self._failed[ref] = None

    def readmit(self) -> bool:
        """Let those that only failed in again; False when there are none."""
        some = bool(self._failed)
        self._failed.clear()
        return some
