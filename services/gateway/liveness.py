"""Asks silent workers whether their process still exists, so that a crash is seen before silence proves it.

A worker that beats needs no question. One that is suspect and that running requests need is sent an empty
Resend as a request: nobody answers it, but when nobody listens any more the bus says so at once. Knows
nothing of requests.
"""

from collections.abc import Coroutine, Iterable

from common.clock import Clock
from common.errors import ControlError, NoResponders
from common.ids import InstanceId, InstanceRef
from common.messages.generation import Accepted
from common.messages.stream import Resend
from common.routing.cluster_view import ClusterView
from common.runtime.bus import MessageBus

PROBE_S = 0.25
SETTLE_S = 5.0
"""After the bus was away, the time that others may need to listen on it again."""


class Liveness:
    """At most one question at a time to each instance."""

    def __init__(self, bus: MessageBus, view: ClusterView, clock: Clock, me: InstanceId) -> None:
        self._bus = bus
        self._view = view
        self._clock = clock
        self._quiet_until = 0.0
        self._me = me
        self._asking: set[InstanceRef] = set()

    def on_bus_state(self, connected: bool) -> None:
        """Ask nobody for a while once the bus is back: nobody may listen yet, and be alive."""
        if connected:
            self._quiet_until = self._clock.now() + SETTLE_S

    def probes(self, refs: Iterable[InstanceRef]) -> list[Coroutine[object, object, None]]:
        """Questions to those of `refs` that are suspect, to be run now."""
        if not self._settled:
            return []
        suspects = [r for r in refs if r not in self._asking and self._view.state(r) == "suspect"]
        self._asking.update(suspects)
        return [self._probe(ref) for ref in suspects]

    def nobody_listens(self, ref: InstanceRef) -> None:
        """The bus says so: its process is gone, unless the bus was away a moment ago."""
        if self._settled:
            self._view.note_gone(ref)

    @property
    def _settled(self) -> bool:
        return self._clock.now() >= self._quiet_until

    async def _probe(self, ref: InstanceRef) -> None:
        question = Resend(self._me, ref.incarnation, ())
        try:
            subject = self._bus.subjects.resend(ref.instance)
            await self._bus.request(subject, question, Accepted, timeout_s=PROBE_S)
        except NoResponders:
            self.nobody_listens(ref)
        except ControlError:
            pass  # silent but listening, or the bus is away: time will tell
        finally:
            self._asking.discard(ref)
