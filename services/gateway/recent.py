"""Requests that ended a moment ago: late frames about them are no surprise. Pure, bounded."""

from collections import OrderedDict

from common.ids import RequestId


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
