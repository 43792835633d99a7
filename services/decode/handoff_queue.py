"""Handoffs that wait for room in the pool, in the order in which the engine takes sequences.

Knows nothing of pools and pulls: the service asks who is next and says who got in or is gone.
"""

from collections.abc import Hashable
from typing import Generic, TypeVar

from common.engine.entry import Entry
from common.engine.ordering import Ordering, rank_of
from common.engine.sequence import Sequence
from common.engine.waiting import WaitingLine
from common.ids import SequenceId

T = TypeVar("T", bound=Hashable)


class HandoffQueue(Generic[T]):
    """Each `item` stands for a handoff; nobody waits for ever (see WaitingLine)."""

    def __init__(self, ordering: Ordering) -> None:
        self._ordering = ordering
        self._line = WaitingLine(ordering)
        self._entries: dict[T, Entry] = {}
        self._items: dict[SequenceId, T] = {}

    def __len__(self) -> int:
        return len(self._line)

    @property
    def num_tokens(self) -> int:
        """Tokens whose KV is waited for."""
        return self._line.num_tokens

    def add(self, item: T, seq: Sequence) -> None:
        """`seq` is what the handoff will be: its KV is computed elsewhere, so there is nothing to compute."""
        entry = self._entries[item] = Entry(seq, rank_of(seq, self._ordering.key(seq, 0)))
        self._items[seq.id] = item
        self._line.add(entry)

    def next(self) -> T:
        """Who gets room before any other. Raises IndexError when nobody waits."""
        return self._items[self._line.next().seq.id]

    def admit(self, item: T) -> None:
        """`item` has its room."""
        entry = self._forget(item)
        self._line.admit(entry)

    def discard(self, item: T) -> None:
        """`item` is gone, if it was here."""
        if item in self._entries:
            self._line.remove(self._forget(item))

    def _forget(self, item: T) -> Entry:
        entry = self._entries.pop(item)
        del self._items[entry.seq.id]
        return entry
