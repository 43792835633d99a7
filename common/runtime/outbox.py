"""What a worker still has to tell its gateways: items gathered into numbered frames, kept until acknowledged.

One frame per gateway and flush, numbered from 1. A frame is forgotten when the gateway's beat says that
nothing up to its number is missing, so the loss of any frame, the one with a finish included, is
repaired by sending it again. Pure: publishing is the worker's business.
"""

from collections import defaultdict, deque
from dataclasses import dataclass, field

from common.ids import InstanceId, InstanceRef
from common.messages.stream import Frame, FrameItem


@dataclass(slots=True)
class _Lane:
    """One gateway's frames: `last` is the number of the newest, `kept` those not yet acknowledged."""

    last: int = 0
    pending: list[FrameItem] = field(default_factory=list)
    kept: deque[Frame] = field(default_factory=deque)


class Outbox:
    """Frames to all gateways of one worker incarnation; `max_kept` bounds what a gateway may owe."""

    def __init__(self, me: InstanceRef, *, max_kept: int = 16_384) -> None:
        self._me = me
        self._max_kept = max_kept
        self._lanes: defaultdict[InstanceId, _Lane] = defaultdict(_Lane)

    def put(self, gateway: InstanceId, item: FrameItem) -> None:
        self._lanes[gateway].pending.append(item)

    def flush(self) -> list[tuple[InstanceId, Frame]]:
        """Turn what was put since the last flush into one frame per gateway, ready to be published."""
        frames = []
        for gateway, lane in self._lanes.items():
            if not lane.pending:
                continue
            lane.last += 1
            frame = Frame(self._me.instance, self._me.incarnation, lane.last, tuple(lane.pending))
            lane.pending.clear()
            lane.kept.append(frame)
            frames.append((gateway, frame))
        return frames

    def acknowledge(self, gateway: InstanceId, number: int) -> None:
        """Forget frames up to `number`: the gateway has them all."""
        lane = self._lanes.get(gateway)
        while lane and lane.kept and lane.kept[0].number <= number:
            lane.kept.popleft()

    def kept(self, gateway: InstanceId, numbers: tuple[int, ...]) -> list[Frame]:
        """Those of `numbers` that are still kept, to be published once more unchanged."""
        lane = self._lanes.get(gateway)
        wanted = set(numbers)
        return [frame for frame in lane.kept if frame.number in wanted] if lane else []

    def overdue(self) -> list[InstanceId]:
        """Gateways that stopped acknowledging: treat them like dead ones."""
        return [gateway for gateway, lane in self._lanes.items() if len(lane.kept) > self._max_kept]

    def last_numbers(self) -> tuple[tuple[str, int], ...]:
        """For the beat: number of the last frame per gateway."""
        return tuple((gateway, lane.last) for gateway, lane in self._lanes.items() if lane.last)

    def forget(self, gateway: InstanceId) -> None:
        """Drop everything for a gateway that is gone. Its id never comes back."""
        self._lanes.pop(gateway, None)
