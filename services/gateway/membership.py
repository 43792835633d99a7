"""What beats tell a gateway: who serves, which frames are missing, who has died.

Knows nothing of requests.
"""

from common.clock import Clock
from common.ids import InstanceId
from common.messages.cluster import Beat, WorkerBeat
from common.messages.stream import Resend
from common.observability.metrics import GatewayMetrics
from common.routing.cluster_view import ClusterView, pairable
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
        if not self.view.instances("router"):
            return "no router serves"
        decodes = self.view.instances("decode")
        if not decodes:
            return "no decode instance serves"
        prefills = self.view.instances("prefill")
        known = any(instance.info.role == "prefill" for instance in self.view.all())
        if known and not any(pairable(p.info, d.info) for p in prefills for d in decodes):
            return "no prefill instance serves that a decode instance can be paired with"
        return ""
