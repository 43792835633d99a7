"""What beats tell a gateway: who serves, which frames are missing, who has died.

Knows nothing of requests.
"""

from common.clock import Clock
from common.ids import InstanceId
from common.messages.cluster import Beat, WorkerBeat
from common.messages.stream import Resend
from common.observability.metrics import GatewayMetrics
from common.routing.cluster_view import ClusterView
from common.runtime.bus import MessageBus
from services.gateway.intake import FrameIntake
from services.gateway.liveness import Liveness


class Membership:
    """The cluster as one gateway, `me`, sees it."""

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
