"""What a worker still has to tell its gateways: items gathered into numbered frames, kept until acknowledged.

One frame per gateway and flush, or several where one would be too large, numbered from 1. A frame is
forgotten when the gateway's beat says that nothing up to its number is missing, so the loss of any frame, the
one with a finish included, is repaired by sending it again. A gateway that seems dead may come back, so
numbers go on where they were, and an empty frame is sent for one that was dropped. Pure: publishing is the
worker's business.
"""

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from common.ids import InstanceId, InstanceRef
from common.messages.stream import Frame, FrameItem, PromptItem, TokensItem

MAX_LOGPROBS = 10_000
"""Log probabilities in one frame: some 40 bytes each, where NATS takes a mebibyte."""


@dataclass(slots=True)
class _Lane:
    """One gateway's frames: `last` is the number of the newest, `kept` those not yet acknowledged.

    Nothing is left of those up to `dropped`.
    """

    last: int = 0
    dropped: int = 0
    pending: list[FrameItem] = field(default_factory=list)
    kept: deque[Frame] = field(default_factory=deque)


class Outbox:
    """Frames to all gateways of one worker incarnation.

    Bounded: `max_kept` frames are what a gateway may owe, and `max_lanes` gateways are remembered, those
    that were longest sent nothing are forgotten first.
    """

    def __init__(self, me: InstanceRef, *, max_kept: int = 16_384, max_lanes: int = 1024) -> None:
        self._me = me
        self._max_kept = max_kept
        self._max_lanes = max_lanes
        self._lanes: OrderedDict[InstanceId, _Lane] = OrderedDict()

    def put(self, gateway: InstanceId, item: FrameItem) -> None:
        lane = self._lanes.setdefault(gateway, _Lane())
        self._lanes.move_to_end(gateway)
        lane.pending.append(item)
        if len(self._lanes) > self._max_lanes:
            self._lanes.popitem(last=False)

    def flush(self) -> list[tuple[InstanceId, Frame]]:
        """Turn what was put since the last flush into frames, ready to be published in this order."""
        frames = []
        for gateway, lane in self._lanes.items():
            for items in _loads(lane.pending):
                lane.last += 1
                frame = self._frame(lane.last, items)
                lane.kept.append(frame)
                frames.append((gateway, frame))
            lane.pending.clear()
        return frames

    def acknowledge(self, gateway: InstanceId, number: int) -> None:
        """Forget frames up to `number`: the gateway has them all."""
        lane = self._lanes.get(gateway)
        while lane and lane.kept and lane.kept[0].number <= number:
            lane.kept.popleft()

    def kept(self, gateway: InstanceId, numbers: tuple[int, ...]) -> list[Frame]:
        """Those of `numbers` that are still owed, to be sent once more: unchanged, or empty if dropped."""
        lane = self._lanes.get(gateway)
        if lane is None:
            return []
        wanted = set(numbers)
        dropped = [self._frame(number, ()) for number in sorted(wanted) if 0 < number <= lane.dropped]
        return [*dropped, *(frame for frame in lane.kept if frame.number in wanted)]

    def overdue(self) -> list[InstanceId]:
        """Gateways that stopped acknowledging: treat them like dead ones."""
        return [gateway for gateway, lane in self._lanes.items() if len(lane.kept) > self._max_kept]

    def last_numbers(self) -> tuple[tuple[str, int], ...]:
        """For the beat: number of the last frame per gateway that has not acknowledged it."""
        return tuple((gateway, lane.last) for gateway, lane in self._lanes.items() if lane.kept)

    def drop(self, gateway: InstanceId) -> None:
        """Keep no frame for a gateway that is gone, or seems so."""
        if lane := self._lanes.get(gateway):
            lane.dropped = lane.last
            lane.kept.clear()
            lane.pending.clear()

    def _frame(self, number: int, items: tuple[FrameItem, ...]) -> Frame:
        return Frame(self._me.instance, self._me.incarnation, number, items)


def _loads(items: list[FrameItem]) -> Iterator[tuple[FrameItem, ...]]:
    """All `items` in order, cut so that no part but one of a single item holds more than MAX_LOGPROBS."""
    first = carried = 0
    for index, item in enumerate(items):
        weight = _num_logprobs(item)
        if carried and carried + weight > MAX_LOGPROBS:
            yield tuple(items[first:index])
            first, carried = index, 0
        carried += weight
    if items:
        yield tuple(items[first:])


def _num_logprobs(item: FrameItem) -> int:
    if not isinstance(item, TokensItem | PromptItem):
        return 0
    return sum(1 + len(token.top) for token in item.logprobs)
