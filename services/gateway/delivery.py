"""What frames say, handed to the requests that it is about, in the order that serves their readers best.

Knows nothing of repeated and missing frames (intake.py).
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from itertools import groupby

from common.ids import InstanceRef, RequestId
from common.messages.stream import Frame, FrameItem
from services.gateway.flow import RequestFlow

OnStranger = Callable[[InstanceRef, RequestId, Iterable[FrameItem]], None]


class Delivery:
    """Requests without a token yet come first in a frame, and the loop has a turn before the others.

    A running stream's events are written where its items are handled (Reply.push), but a first token wakes
    the task that sends the headers: after the whole frame, it would be later than every other token of it.
    What a frame leaves for that turn comes before the next frame, so each request's items stay in order.
    """

    def __init__(self, flows: Mapping[RequestId, RequestFlow], on_stranger: OnStranger) -> None:
        """`on_stranger` is told of items about requests that are not in `flows`."""
        self._flows = flows
        self._on_stranger = on_stranger
        self._later: list[tuple[RequestFlow, InstanceRef, list[FrameItem]]] = []

    def take(self, frame: Frame) -> None:
        self._go_on()
        source = InstanceRef(frame.instance, frame.incarnation)
        woken = False
        for request, items in groupby(frame.items, _request_of):
            flow = self._flows.get(request)
            if flow is None:
                self._on_stranger(source, request, items)
            elif flow.begun:
                self._later.append((flow, source, [*items]))
            else:
                flow.items(source, items)
                woken = True
        if woken:
            asyncio.get_running_loop().call_soon(self._go_on)
        else:
            self._go_on()

    def _go_on(self) -> None:
        later, self._later = self._later, []
        for flow, source, items in later:
            flow.items(source, items)


def _request_of(item: FrameItem) -> RequestId:
    return item.key.request
