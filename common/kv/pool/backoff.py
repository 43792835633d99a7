"""When to leave a KV pool alone: after a failure for a while, so that not every request pays for it.

Pure; knows nothing of pools.
"""

from common.clock import Clock

FIRST_S = 1.0
LONGEST_S = 30.0


class Backoff:
    """| state | event | next |
    |---|---|---|
    | usable | failed | not usable for FIRST_S; after each further failure twice as long, at most LONGEST_S |
    | not usable | failed: a call that was under way | not usable, no longer than before |
    | not usable | its time is over | usable, on trial |
    | any | succeeded | usable |
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._seconds = 0.0
        self._until = 0.0

    @property
    def usable(self) -> bool:
        return not self._seconds or self._clock.now() >= self._until

    def failed(self) -> float:
        """How many seconds it is to be left alone from now on."""
        now = self._clock.now()
        if self.usable:
            self._seconds = min(self._seconds * 2, LONGEST_S) or FIRST_S
            self._until = now + self._seconds
        return self._until - now

    def succeeded(self) -> None:
        self._seconds = 0.0
