"""A KV pool in memory that the workers of a simulated cluster share, with the faults of a real one."""

import asyncio
from collections import Counter
from collections.abc import Sequence as Seq

from common.errors import KVPoolUnavailable
from common.transport.kv import Buffer


class MemoryPool:
    """Obeys KVPool's contract. Calls take `delay_s`, and as many fail as `timeout_s` is shorter.

    `down`: every call fails at once. `damaged`: names that are found, but cannot be loaded. More than
    `max_blocks` are not taken. `calls` counts, `loaded` and `published` count blocks.
    """

    def __init__(self, delay_s: float = 0.001, timeout_s: float = 2.0, max_blocks: int = 1 << 30) -> None:
        self.delay_s = delay_s
        self.timeout_s = timeout_s
        self.max_blocks = max_blocks
        self.down = False
        self.objects: dict[bytes, bytes] = {}
        self.damaged: set[bytes] = set()
        self.calls: Counter[str] = Counter()
        self.loaded = 0
        self.published = 0

    async def match(self, names: Seq[bytes]) -> int:
        await self._answer("match")
        return self._found(names)

    async def load(self, names: Seq[bytes], blocks: Seq[Buffer]) -> int:
        assert len(names) == len(blocks)
        await self._answer("load")
        done = 0
        for name, block in zip(names[: self._found(names)], blocks, strict=False):
            memoryview(block)[:] = b"\xa5" * len(self.objects[name])  # type: ignore[arg-type]
            if name in self.damaged:
                break
            memoryview(block)[:] = self.objects[name]  # type: ignore[arg-type]
            done += 1
        self.loaded += done
        return done

    async def publish(self, names: Seq[bytes], blocks: Seq[Buffer]) -> int:
        assert len(names) == len(blocks)
        await self._answer("publish")
        for done, (name, block) in enumerate(zip(names, blocks, strict=True)):
            content = memoryview(block).tobytes()  # type: ignore[arg-type]
            if name not in self.objects:
                if len(self.objects) >= self.max_blocks:
                    return done
                self.objects[name] = content
                self.published += 1
            assert self.objects[name] == content, "one name, two contents"
        return len(names)

    async def close(self) -> None:
        """Nothing to let go of."""

    async def _answer(self, call: str) -> None:
        self.calls[call] += 1
        if self.down:
            raise KVPoolUnavailable("nobody is there")
        await asyncio.sleep(min(self.delay_s, self.timeout_s))
        if self.delay_s >= self.timeout_s:
            raise KVPoolUnavailable("no answer")

    def _found(self, names: Seq[bytes]) -> int:
        return next((i for i, name in enumerate(names) if name not in self.objects), len(names))
