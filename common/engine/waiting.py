"""Those who wait for their first blocks: who of them is next, and that nobody waits for ever.

Knows ranks and ages, not blocks and budgets: whether the next one fits is its owner's question.
"""

from bisect import bisect_left, insort
from typing import Final

from common.engine.entry import Entry, by_rank
from common.engine.ordering import Ordering, rank_of

AGING: Final = 4
"""How many tokens are admitted before the oldest, for each of its own, until it is its turn."""
LEAST_TURN: Final = 2048
"""A shorter one counts as having so many. Else every other admission would be a turn where the old ones are
short and those with better ranks long."""


class WaitingLine:
    """Admits by rank, but gives the oldest its turn when AGING times its own tokens were admitted before it.

    So a fifth of the work on prompts, 1 / (1 + AGING), is the most that turns take from the order, and nobody
    starves: whoever comes while older ones wait is admitted, at the latest, when AGING times its tokens and
    theirs have been admitted besides, each counted as LEAST_TURN at least, and one prompt for each of them.
    Counted in tokens and not in seconds: a limit in seconds would turn every order into first come, first
    served as soon as there is more work than that, which is when the order matters most. Whoever had its
    turn (`senior`) goes before all that go by a key from then on, or preemptions could take it back for ever.
    """

    def __init__(self, ordering: Ordering) -> None:
        self._ordering = ordering
        self._by_rank: list[Entry] = []
        self._by_age: list[Entry] = []
        self._passed = 0
        """Tokens admitted before the oldest since it is the oldest."""

    def __len__(self) -> int:
        return len(self._by_rank)

    @property
    def num_tokens(self) -> int:
        """Tokens to compute for all of them."""
        return sum(entry.seq.num_uncomputed for entry in self._by_rank)

    def add(self, entry: Entry) -> None:
        insort(self._by_rank, entry, key=by_rank)
        insort(self._by_age, entry, key=_age)

    def next(self) -> Entry:
        """The one to be admitted before any other. Raises IndexError when nobody waits."""
        oldest = self._by_age[0]
        if self._is_due(oldest):
            return oldest
        head = self._by_rank[0]
        hopeless_below = self._ordering.hopeless_below()
        first = (1, hopeless_below, 0.0, 0)
        if head.rank[0] == 0 or head.rank >= first:
            return head
        index = bisect_left(self._by_rank, first, key=by_rank)
        return self._by_rank[index] if index < len(self._by_rank) else head

    def admit(self, entry: Entry) -> None:
        """`entry` has its blocks and leaves the line; what is left to compute of it passes the oldest."""
        if entry is not self._by_age[0]:
            self._passed += entry.seq.num_uncomputed
        elif self._is_due(entry):
            entry.senior = True
        self.remove(entry)
        if entry.senior:
            entry.rank = rank_of(entry.seq, None)

    def remove(self, entry: Entry) -> None:
        if entry is self._by_age[0]:
            self._passed = 0
        self._by_rank.remove(entry)
        self._by_age.remove(entry)

    def _is_due(self, oldest: Entry) -> bool:
        return self._passed >= AGING * max(LEAST_TURN, len(oldest.seq.tokens))


def _age(entry: Entry) -> tuple[float, int]:
    return (entry.seq.arrival, entry.seq.id)
