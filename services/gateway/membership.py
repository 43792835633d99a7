"""The cluster as one gateway sees it: who serves, which frames are missing, who has died.

A worker that beats needs no question. One that is suspect and that running requests need is sent an empty
Resend as a request: nobody answers it, but when nobody listens any more the bus says so at once, before
silence proves it. Knows nothing of requests.
"""

from collections.abc import Coroutine, Iterable

from common.clock import Clock
from common.errors import ControlError, MessageInvalid, NoResponders
from common.ids import InstanceId, InstanceRef
from common.messages.cluster import Beat, WorkerBeat
from common.messages.generation import Accepted
from common.messages.stream import Resend
from common.observability.metrics import GatewayMetrics
from common.routing.cluster_view import ClusterView
from common.runtime.bus import MessageBus
from services.gateway.intake import FrameIntake

PROBE_S = 0.25
SETTLE_S = 5.0
"""After the bus was away, the time that others may need to listen on it again."""


class Liveness:
    """Asks silent workers whether their process still exists; one question at a time to each."""

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
        except (ControlError, MessageInvalid):
            pass  # silent or odd, but listening, or the bus is away: time will tell
        finally:
            self._asking.discard(ref)


class Membership:
    """What beats tell the gateway `me`."""

    def __init__(
        self, bus: MessageBus, clock: Clock, me: InstanceId, intake: FrameIntake, metrics: GatewayMetrics
    ) -> None:
        self.view = ClusterView(clock)
        self.liveness = Liveness(bus, self.view, clock, me)
        self._bus = bus
        self._me = me
        self._intake = intake
        self._metrics = metrics

    def on_bus_state(self, connected: bool) -> None:
        self.view.on_bus_state(connected)
        self.liveness.on_bus_state(connected)

    def on_beat(self, beat: Beat) -> None:
        """Note who is there, and ask a worker again for frames that it says we should have."""
        ref = beat.info.ref
        known = self.view.get(ref) is not None
        self.view.observe(beat)
        if not known and self.view.get(ref) is not None:
            self._intake.replaced_by(ref)
        if not isinstance(beat, WorkerBeat):
            return
        for gateway, last in beat.last_frames:
            if gateway == self._me and (missing := self._intake.missing(ref, last)):
                self._metrics.frames_missed.inc(len(missing))
                resend = Resend(self._me, ref.incarnation, missing)
                self._bus.publish(self._bus.subjects.resend(ref.instance), resend)

    def why_not_ready(self) -> str:
        """What a request would have to wait for; "" when one can be served."""
        if not self._bus.connected:
            return "the message bus is not connected"
        routers = [
            i for i in self.view.all() if i.info.role == "router" and self.view.state(i.ref) == "alive"
        ]
        if not routers:
            return "no router serves"
        if not any(router.info.ready for router in routers):
            return "no router has an instance for a request"
        return ""
