"""A meter that remembers."""

from collections import Counter

from common.kv.pool.base import PoolEvent


class CountingMeter:
    def __init__(self) -> None:
        self.events: Counter[str] = Counter()

    def count(self, event: PoolEvent, blocks: int) -> None:
        self.events[event] += blocks

    def unavailable(self) -> None:
        self.events["unavailable"] += 1
