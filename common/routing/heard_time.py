"""Time as far as this process could hear others: what silence is measured in.

Wall time is unfair to the others when the fault is one's own: a lost bus, a hung server, a process that was
paused and finds its socket full. While nothing at all is heard, not even one's own beats coming back,
heard time stands still after `patience_s`. Pure.
"""


class HeardTime:
    """Seconds that passed while the bus could be heard; starts at 0."""

    def __init__(self, patience_s: float, now: float) -> None:
        self._patience_s = patience_s
        self._total = 0.0
        self._last = now
        self._deaf = False

    def at(self, now: float) -> float:
        """Heard time at `now`."""
        return self._total + self._since(now)

    def heard(self, now: float) -> None:
        """Something arrived."""
        self._total += self._since(now)
        self._last = now

    def pause(self, now: float) -> None:
        """The bus is known to be lost: nothing counts until `resume`."""
        self.heard(now)
        self._deaf = True

    def resume(self, now: float) -> None:
        self.heard(now)
        self._deaf = False

    def _since(self, now: float) -> float:
        return 0.0 if self._deaf else min(now - self._last, self._patience_s)
