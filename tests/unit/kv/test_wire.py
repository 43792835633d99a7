"""The control messages' bytes: what is encoded comes back, and garbage is MessageInvalid, never a crash."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import KVMismatch, KVRevoked, KVTransferError, KVUnknownLease, MessageInvalid
from common.ids import Incarnation, InstanceId, InstanceRef, LeaseId
from common.kv.wire import (
    CONTROL_TAG,
    HEADER_BYTES,
    MAX_BLOCKS,
    MAX_BODY_BYTES,
    MAX_PULL_ID,
    FinalResult,
    FirstToken,
    Kind,
    Open,
    WireMessage,
    data_tag,
    decode_header,
    encode_header,
    refusal,
    refused,
)
from common.messages import codec
from common.messages.handoff import LeaseGrant
from common.messages.stream import PrefillStats, TokenLogprobs

pulls = st.integers(1, MAX_PULL_ID)
messages = st.builds(
    WireMessage,
    kind=st.sampled_from(Kind),
    pull=pulls,
    first=st.integers(0, MAX_BLOCKS // 2),
    count=st.integers(0, MAX_BLOCKS // 2),
    body=st.binary(max_size=64),
)


@given(messages)
def test_headers_round_trip(message: WireMessage) -> None:
    data = encode_header(message)
    decoded, body_bytes = decode_header(data)
    assert len(data) == HEADER_BYTES
    assert body_bytes == len(message.body)
    assert (decoded.kind, decoded.pull, decoded.first, decoded.count) == (
        message.kind,
        message.pull,
        message.first,
        message.count,
    )


def test_a_header_is_these_very_bytes() -> None:
    header = encode_header(WireMessage(Kind.ASK, 7, 16, 32))
    assert header.hex() == "474c4b560001020000000007000000100000002000000000"


@given(st.binary(max_size=2 * HEADER_BYTES))
def test_garbage_is_invalid(data: bytes) -> None:
    with pytest.raises(MessageInvalid):
        decode_header(data)


@given(messages, st.integers(0, HEADER_BYTES - 1), st.integers(1, 255))
def test_a_flipped_byte_is_another_message_or_invalid(message: WireMessage, at: int, change: int) -> None:
    data = bytearray(encode_header(message))
    data[at] ^= change
    try:
        decoded, body_bytes = decode_header(bytes(data))
    except MessageInvalid:
        return
    assert 1 <= decoded.pull <= MAX_PULL_ID
    assert body_bytes <= MAX_BODY_BYTES
    assert decoded.first + decoded.count <= MAX_BLOCKS


def test_a_body_above_the_bound_is_not_sent() -> None:
    with pytest.raises(MessageInvalid):
        encode_header(WireMessage(Kind.FINAL, 1, body=bytes(MAX_BODY_BYTES + 1)))


@given(pulls, pulls, st.integers(0, MAX_BLOCKS - 1), st.integers(0, MAX_BLOCKS - 1))
def test_tags_are_unique_within_40_bits(pull: int, other: int, index: int, another: int) -> None:
    assert CONTROL_TAG < data_tag(pull, index) < 1 << 40
    assert (data_tag(pull, index) == data_tag(other, another)) == ((pull, index) == (other, another))


@pytest.mark.parametrize("cls", [KVUnknownLease, KVRevoked, KVMismatch])
def test_a_refusal_is_the_same_error_on_the_other_side(cls: type[KVTransferError]) -> None:
    error = refused(refusal(1, cls("why")))
    assert type(error) is cls
    assert error.message == "why"


def test_bodies_round_trip() -> None:
    reader = InstanceRef(InstanceId("d"), Incarnation("1"))
    opening = Open(LeaseGrant(LeaseId("l"), 2, reader, "token"), "fingerprint")
    final = FinalResult(
        (FirstToken(0, 42, TokenLogprobs(-0.5, ((42, -0.5), (7, -1.0)))), FirstToken(1, 2, None, "stop", 2)),
        PrefillStats(16, 1.5, 20.0),
    )
    assert codec.decode(codec.encode(opening), Open) == opening
    assert codec.decode(codec.encode(final), FinalResult) == final
