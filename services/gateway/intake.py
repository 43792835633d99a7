"""Which frames have arrived from which worker, and which are missing: how the loss of any frame is noticed.

And which requests ended a moment ago, so that a late frame about them is no surprise. Pure. Knows nothing of
what frames carry and how they are asked for again.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from common.ids import InstanceRef, RequestId
from common.messages.stream import Frame


@dataclass(slots=True)
class _Lane:
    """One worker incarnation's frames: all up to `received` are here, and those in `beyond`."""

    received: int = 0
    beyond: set[int] = field(default_factory=set)
    announced: int = 0
    asked: int = 0
    """How often in a row frame `received` + 1 was asked for."""

    def settle(self) -> None:
        while self.received + 1 in self.beyond:
            self.received += 1
            self.beyond.remove(self.received)
            self.asked = 0


class FrameIntake:
    """Frame numbers per worker incarnation, which start at 1.

    Bounded: `max_lanes` incarnations are remembered, those longest silent are dropped first; at most
    `max_asked` numbers are missing at once in one request for them; a frame that was asked for `give_up`
    times is taken for lost for ever, because its worker has forgotten it (its requests' deadlines remain).
    """

    def __init__(self, *, max_lanes: int = 1024, max_asked: int = 256, give_up: int = 300) -> None:
        self._max_lanes = max_lanes
        self._max_asked = max_asked
        self._give_up = give_up
        self._lanes: OrderedDict[InstanceRef, _Lane] = OrderedDict()

    def take(self, frame: Frame) -> bool:
        """Note the frame; False when it had arrived before."""
        lane = self._lane(InstanceRef(frame.instance, frame.incarnation))
        if frame.number <= lane.received or frame.number in lane.beyond:
            return False
        lane.beyond.add(frame.number)
        lane.settle()
        return True

    def missing(self, ref: InstanceRef, announced: int) -> tuple[int, ...]:
        """Numbers to ask `ref` for, whose beat says that `announced` frames were sent to us."""
        lane = self._lane(ref)
        lane.announced = max(lane.announced, announced)
        if lane.received >= lane.announced:
            return ()
        lane.asked += 1
        if lane.asked > self._give_up:
            lane.beyond.add(lane.received + 1)
            lane.settle()
        numbers = (n for n in range(lane.received + 1, lane.announced + 1) if n not in lane.beyond)
        return tuple(n for n, _ in zip(numbers, range(self._max_asked), strict=False))

    def received(self) -> tuple[tuple[InstanceRef, int], ...]:
        """Per incarnation, the number up to which nothing is missing."""
        return tuple((ref, lane.received) for ref, lane in self._lanes.items() if lane.received)

    def replaced_by(self, ref: InstanceRef) -> None:
        """Forget earlier incarnations of `ref`'s name: nothing more comes from them."""
        for old in [one for one in self._lanes if one.instance == ref.instance and one != ref]:
            del self._lanes[old]

    def _lane(self, ref: InstanceRef) -> _Lane:
        lane = self._lanes.get(ref)
        if lane is None:
            lane = self._lanes[ref] = _Lane()
            while len(self._lanes) > self._max_lanes:
                self._lanes.popitem(last=False)
        else:
            self._lanes.move_to_end(ref)
        return lane


class RecentRequests:
    """The last `limit` requests that ended."""

    def __init__(self, limit: int = 16_384) -> None:
        self._limit = limit
        self._ids: OrderedDict[RequestId, None] = OrderedDict()

    def add(self, request: RequestId) -> None:
        self._ids[request] = None
        while len(self._ids) > self._limit:
            self._ids.popitem(last=False)

    def __contains__(self, request: RequestId) -> bool:
        return request in self._ids
