"""Which attempts a worker has seen: jobs, handoffs and aborts may be repeated and overtake each other.

Pure. Knows nothing of what an attempt holds; that is the service's record.
"""

from collections import OrderedDict
from typing import Literal, TypeVar

from common.clock import Clock
from common.ids import AttemptKey, RequestId

Verdict = Literal["new", "known", "aborted"]
K = TypeVar("K")
V = TypeVar("V")


class AttemptTable:
    """Memory of attempts, one state per (request, attempt, choice):

    | state   | admit            | abort             | forgotten               |
    |---------|------------------|-------------------|-------------------------|
    | unknown | new -> known     | -> aborted        |                         |
    | known   | answer "known"   | -> aborted        | at its deadline         |
    | aborted | answer "aborted" | stays             | at its deadline         |

    An abort of attempt n covers all attempts <= n of that (request, choice). Bounded: beyond
    `max_remembered` the entry that was touched longest ago is dropped first.
    """

    def __init__(self, clock: Clock, *, max_remembered: int = 65_536) -> None:
        self._clock = clock
        self._max = max_remembered
        self._known: OrderedDict[AttemptKey, float] = OrderedDict()
        self._aborted: OrderedDict[tuple[RequestId, int], tuple[int, float]] = OrderedDict()

    def verdict(self, key: AttemptKey) -> Verdict:
        """What a job or handoff with this key is: to be started, a repeat, or one that must not start."""
        now = self._clock.now()
        attempt, until = self._aborted.get((key.request, key.choice), (0, 0.0))
        if key.attempt <= attempt and now < until:
            return "aborted"
        if now < self._known.get(key, 0.0):
            return "known"
        return "new"

    def remember(self, key: AttemptKey, time_left_s: float) -> None:
        """The attempt was started here; repeats within `time_left_s` are known."""
        self._known[key] = self._clock.now() + time_left_s
        self._known.move_to_end(key)
        _trim(self._known, self._max)

    def abort(self, key: AttemptKey, time_left_s: float) -> None:
        """Refuse this attempt and earlier ones of its (request, choice) for `time_left_s`."""
        place = (key.request, key.choice)
        attempt, until = self._aborted.get(place, (0, 0.0))
        self._aborted[place] = (
            max(attempt, key.attempt),
            max(until, self._clock.now() + time_left_s),
        )
        self._aborted.move_to_end(place)
        _trim(self._aborted, self._max)


def _trim(table: "OrderedDict[K, V]", limit: int) -> None:
    while len(table) > limit:
        table.popitem(last=False)
