"""One try at one choice: on which worker it runs, which decode it is bound to, whose death would end it.

Pure. Knows nothing of messages and tokens.
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
