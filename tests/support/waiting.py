"""Waiting for what a test expects, by event and with a deadline."""

import asyncio
from typing import Generic, TypeVar

T = TypeVar("T")


class Collector(Generic[T]):
    """Notes down what arrives and lets a test wait for the n-th."""

    def __init__(self) -> None:
        self.items: list[T] = []
        self._more = asyncio.Event()

    def add(self, item: T) -> None:
        self.items.append(item)
        self._more.set()

    async def wait_for(self, count: int, timeout_s: float = 10.0) -> list[T]:
        """All items once there are at least `count`. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while len(self.items) < count:
                self._more.clear()
                await self._more.wait()
        return self.items
