"""The names of blocks are a format: the same in every process, for every way to compute them."""

import hashlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import MessageInvalid
from common.messages.block_hash import HASH_BYTES, BlockHasher, pack, unpack


def test_names_are_the_documented_chain() -> None:
    key = hashlib.blake2b(b"salt", key=b"model", digest_size=32).digest()
    first = hashlib.blake2b(struct.pack("<4q", 0, 1, 2, 3), key=key, digest_size=16).digest()
    second = hashlib.blake2b(first + struct.pack("<4q", 4, 5, 6, 7), key=key, digest_size=16).digest()
    assert BlockHasher("model", 4).hashes(range(11), "salt") == [first, second]


def test_nothing_short_of_a_block_has_a_name() -> None:
    assert BlockHasher("model", 4).hashes(range(3)) == []
    assert len(BlockHasher("model", 4).hashes(range(4))) == 1


def test_model_salt_and_what_came_before_are_part_of_a_name() -> None:
    tokens = [5, 6, 7, 8, 1, 2, 3, 4]
    names = [
        BlockHasher("model", 4).hashes(tokens)[1],
        BlockHasher("other", 4).hashes(tokens)[1],
        BlockHasher("model", 4).hashes(tokens, "tenant")[1],
        BlockHasher("model", 4).hashes([0, *tokens[1:]])[1],
        BlockHasher("model", 4).hashes(tokens[4:])[0],
    ]
    assert len(set(names)) == len(names)


@given(tokens=st.lists(st.integers(0, 2**40), max_size=30), known=st.integers(0, 7))
def test_a_chain_can_be_extended_later(tokens: list[int], known: int) -> None:
    hasher = BlockHasher("model", 4)
    whole = hasher.hashes(tokens)
    chain = whole[:known]
    hasher.extend(chain, tokens, "", len(whole))
    assert chain == whole


@given(st.lists(st.binary(min_size=HASH_BYTES, max_size=HASH_BYTES), max_size=5))
def test_names_survive_the_wire(hashes: list[bytes]) -> None:
    assert unpack(pack(hashes)) == hashes


@pytest.mark.parametrize("text", ["zz" * HASH_BYTES, "00", "0" * 33, "é"])
def test_what_is_no_name_is_refused(text: str) -> None:
    with pytest.raises(MessageInvalid):
        unpack(text)
