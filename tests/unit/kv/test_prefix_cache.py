"""Prefix hits: exactly the longest known prefix in full blocks, never the last token, never across salts."""

import hashlib
import struct

from hypothesis import given
from hypothesis import strategies as st

from common.kv.block_pool import BlockPool
from common.kv.prefix_cache import PrefixCache

SIZE = 4


def make(num_blocks: int = 32, fingerprint: str = "model") -> tuple[BlockPool, PrefixCache]:
    pool = BlockPool(num_blocks, SIZE)
    return pool, PrefixCache(pool, fingerprint)


def test_a_hit_never_covers_the_last_token() -> None:
    pool, cache = make()
    table = pool.allocate(2)
    cache.register(range(8), "", table, 8)
    assert cache.match(range(8)) == table[:1]
    assert cache.match(range(9)) == table
    assert cache.match([]) == []


def test_only_full_computed_blocks_are_named() -> None:
    pool, cache = make()
    table = pool.allocate(3)
    assert cache.register(range(12), "", table, 7) == 1
    assert cache.match(range(12)) == table[:1]


def test_salts_and_models_do_not_meet() -> None:
    pool, cache = make()
    table = pool.allocate(1)
    cache.register(range(4), "tenant", table, 4)
    assert cache.match(range(9), "tenant") == table
    assert cache.match(range(9), "") == []
    assert PrefixCache(pool, "other model").match(range(9), "tenant") == []


def test_equal_tokens_after_another_prefix_are_another_block() -> None:
    pool, cache = make()
    table = pool.allocate(2)
    cache.register([1, 1, 1, 1, 7, 7, 7, 7], "", table, 8)
    assert cache.match([2, 2, 2, 2, 7, 7, 7, 7, 0]) == []
    assert cache.match([7, 7, 7, 7, 0]) == []


def test_a_block_is_found_until_it_is_given_away() -> None:
    pool, cache = make(num_blocks=2)
    table = pool.allocate(2)
    cache.register(range(8), "", table, 8)
    pool.release(table)
    assert cache.match(range(9)) == table
    pool.allocate(1)
    assert cache.match(range(9)) == table[:1]


def test_names_are_the_documented_chain() -> None:
    """Other processes compute the same names, so the chain is a format."""
    pool, cache = make()
    table = pool.allocate(2)
    cache.register(range(8), "salt", table, 8)
    key = hashlib.blake2b(b"salt", key=b"model", digest_size=32).digest()
    parent = b""
    for start, block in zip((0, 4), table, strict=True):
        data = parent + struct.pack("<4q", *range(start, start + 4))
        parent = hashlib.blake2b(data, key=key, digest_size=16).digest()
        assert pool.find(parent) == block


tokens = st.lists(st.integers(0, 1), min_size=1, max_size=20)


@given(known=st.lists(tokens, max_size=4), prompt=tokens, memo=st.booleans())
def test_a_match_is_the_longest_known_prefix(known: list[list[int]], prompt: list[int], memo: bool) -> None:
    pool, cache = make()
    content: dict[int, tuple[int, ...]] = {}
    prefixes: set[tuple[int, ...]] = set()
    for sequence in known:
        table = pool.allocate(pool.blocks_for(len(sequence)))
        cache.register(sequence, "", table, len(sequence))
        for index, block in enumerate(table[: len(sequence) // SIZE]):
            content[block] = tuple(sequence[: (index + 1) * SIZE])
            prefixes.add(content[block])
    hashes: list[bytes] | None = [] if memo else None
    used = pool.num_used
    found = [cache.match(prompt, "", hashes) for _ in range(2)]
    assert found[0] == found[1]
    assert pool.num_used == used
    expected = []
    for end in range(SIZE, len(prompt), SIZE):
        if tuple(prompt[:end]) not in prefixes:
            break
        expected.append(tuple(prompt[:end]))
    assert [content[block] for block in found[0]] == expected
