"""Cutting long messages into parts, and putting them together again under loss and repetition."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import MessageInvalid
from common.runtime.parts import Part, PartAck, PartRefused, Reassembly, is_part, pack, split, unpack


@given(payload=st.binary(min_size=1, max_size=5000), max_payload=st.integers(300, 1500))
def test_parts_fit_and_give_the_message_back(payload: bytes, max_payload: int) -> None:
    pieces = split(payload, max_payload)
    reassembly = Reassembly()
    for index, piece in enumerate(pieces):
        packed = pack(Part("0123456789abcdef", index, len(pieces)), piece)
        assert is_part(packed)
        assert len(packed) <= max_payload
        outcome = reassembly.add(*unpack(packed), now=0.0)
        assert outcome == (payload if index == len(pieces) - 1 else PartAck())
    assert reassembly.num_bytes == 0


@given(order=st.permutations(range(4)))
def test_a_message_out_of_order_is_never_put_together_wrong(order: list[int]) -> None:
    reassembly = Reassembly()
    outcomes = [reassembly.add(Part("m", index, 4), bytes([index]), 0.0) for index in order]
    whole = [outcome for outcome in outcomes if isinstance(outcome, bytes)]
    assert whole == ([bytes(range(4))] if order == [0, 1, 2, 3] else [])
    if order != [0, 1, 2, 3]:
        assert PartRefused() in outcomes


def test_a_repeated_first_part_begins_anew() -> None:
    reassembly = Reassembly()
    reassembly.add(Part("m", 0, 2), b"old", 0.0)
    assert reassembly.add(Part("m", 0, 2), b"new", 0.0) == PartAck()
    assert reassembly.add(Part("m", 1, 2), b"!", 0.0) == b"new!"


def test_memory_is_bounded_and_idle_messages_are_forgotten() -> None:
    reassembly = Reassembly(max_bytes=100, idle_s=10.0)
    assert reassembly.add(Part("a", 0, 3), bytes(60), 0.0) == PartAck()
    assert reassembly.add(Part("b", 0, 3), bytes(60), 5.0) == PartRefused()
    assert reassembly.num_bytes == 60
    assert reassembly.add(Part("b", 0, 3), bytes(60), 10.5) == PartAck()
    assert reassembly.num_bytes == 60
    assert reassembly.add(Part("a", 1, 3), bytes(1), 10.5) == PartRefused()


@pytest.mark.parametrize("bad", [b"part ", b"part {}", b"part nonsense\nabc", b'part {"kind": "part"}\nabc'])
def test_a_broken_part_is_invalid(bad: bytes) -> None:
    with pytest.raises(MessageInvalid):
        unpack(bad)
