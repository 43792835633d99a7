"""Who holds which KV block: reference counts, and the memory of what idle blocks still contain.

Pure bookkeeping over block numbers: knows nothing of the bytes, of tokens, or of how a hash is made
(messages/block_hash.py). A hash lives and dies with its block here, so that the index can never name a block
whose content was given away.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from common.errors import PoolExhausted
from common.ids import BlockId


@dataclass(frozen=True, slots=True)
class CacheChanges:
    """What became known, and what ceased to be, between two looks; no hash is in both. Oldest first."""

    stored: tuple[bytes, ...] = ()
    evicted: tuple[bytes, ...] = ()


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens each. Not thread-safe: one event loop owns it.

    | state   | event    | next                                                                     |
    |---------|----------|--------------------------------------------------------------------------|
    | free    | allocate | used, one reference                                                      |
    | used    | retain   | used, one reference more                                                 |
    | used    | release  | used, one reference less; after the last: cached if it has a hash, else free |
    | cached  | retain   | used, one reference; content kept                                        |
    | cached  | allocate | used, hash forgotten; only when nothing is free, least recently used first   |

    `retain` of a free block and `release` of an unused one are bugs of the caller: ValueError.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._references = [0] * num_blocks
        self._free = deque(BlockId(block) for block in range(num_blocks))
        self._cached: dict[BlockId, None] = {}
        """Idle blocks with known content, least recently used first."""
        self._hash_of: dict[BlockId, bytes] = {}
        self._holder: dict[bytes, BlockId] = {}
        # Net of each other, so that they hold no more than the pool does, however seldom they are taken.
        self._stored: dict[bytes, None] = {}
        self._evicted: dict[bytes, None] = {}
        self._listeners: list[Callable[[], None]] = []

    @property
    def num_free(self) -> int:
        """How many blocks `allocate` can give: the free and the cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def can_allocate(self, count: int, sharing: Iterable[BlockId] = ()) -> bool:
        """Whether `allocate` with the same arguments would succeed."""
        return count <= self.num_free - sum(block in self._cached for block in sharing)

    def allocate(self, count: int, sharing: Collection[BlockId] = ()) -> list[BlockId]:
        """`count` fresh blocks with one reference each, while the blocks in `sharing` get one more.

        Their content is whatever was there before. Raises PoolExhausted and changes nothing when there are
        too few.
        """
        if not self.can_allocate(count, sharing):
            raise PoolExhausted(f"{count} KV blocks wanted, {self.num_free} of {self.num_blocks} are free")
        self.retain(sharing)
        blocks = [self._free.popleft() if self._free else self._evict() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def retain(self, blocks: Iterable[BlockId]) -> None:
        """One more reference on each block, used or cached. Raises ValueError for a free one."""
        for block in blocks:
            if self._references[block] == 0:
                if block not in self._cached:
                    raise ValueError(f"block {block} is free: nothing to retain")
                del self._cached[block]
            self._references[block] += 1

    def release(self, blocks: Collection[BlockId]) -> None:
        """One reference less on each block. Raises ValueError for a block that nobody holds."""
        freed = False
        # From the end of the table, so that of one prefix the tail is evicted before what it hangs on.
        for block in reversed(list(blocks)):
            if self._references[block] == 0:
                raise ValueError(f"block {block} is released more often than it was taken")
            self._references[block] -= 1
            if self._references[block] == 0:
                freed = True
                if block in self._hash_of:
                    self._cached[block] = None
                else:
                    self._free.append(block)
        if freed:
            for listener in self._listeners:
                listener()

    def find(self, content: bytes) -> BlockId | None:
        """The used or cached block known to hold the content with this hash."""
        return self._holder.get(content)

    def name_of(self, block: BlockId) -> bytes | None:
        """The hash of the block's content, where `remember` was told it and another block did not have it."""
        return self._hash_of.get(block)

    def remember(self, block: BlockId, content: bytes) -> None:
        """Note the hash of a used block's final content; a second block of equal content stays unnamed."""
        if self._references[block] == 0:
            raise ValueError(f"block {block} is not in use: its content may not be named")
        if block not in self._hash_of and content not in self._holder:
            self._hash_of[block] = content
            self._holder[content] = block
            _net(content, gone_from=self._evicted, come_to=self._stored)

    def contents(self) -> tuple[bytes, ...]:
        """The hashes of all used and cached blocks known to hold something; every one is found by `find`."""
        return tuple(self._holder)

    def take_changes(self) -> CacheChanges:
        """How `contents` differs from what it was at the last call, or in the beginning."""
        changes = CacheChanges(tuple(self._stored), tuple(self._evicted))
        self._stored.clear()
        self._evicted.clear()
        return changes

    def on_free(self, listener: Callable[[], None]) -> None:
        """Call `listener` after every release that made blocks allocatable; it may only take a note."""
        self._listeners.append(listener)

    def _evict(self) -> BlockId:
        block = next(iter(self._cached))
        del self._cached[block]
        content = self._hash_of.pop(block)
        del self._holder[content]
        _net(content, gone_from=self._stored, come_to=self._evicted)
        return block


def _net(content: bytes, *, gone_from: dict[bytes, None], come_to: dict[bytes, None]) -> None:
    """Note a change, unless it takes one back that nobody has seen."""
    if content in gone_from:
        del gone_from[content]
    else:
        come_to[content] = None
