"""Transfer tokens: only the very grant that was issued passes, and only until its expiry."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import KVRevoked, KVTransferError, KVUnknownLease
from common.ids import Incarnation, InstanceId, InstanceRef, LeaseId
from common.kv.transfer_token import TransferTokens

ISSUER = InstanceRef(InstanceId("prefill-0"), Incarnation("a"))
READER = InstanceRef(InstanceId("decode-0"), Incarnation("b"))
TOKENS = TransferTokens(b"secret", ISSUER)
GRANT = TOKENS.grant(LeaseId("lease"), 3, READER, expires=100.0)


def test_a_grant_passes_until_its_expiry() -> None:
    TOKENS.check(GRANT, now=0.0)
    TOKENS.check(GRANT, now=99.9)
    with pytest.raises(KVRevoked):
        TOKENS.check(GRANT, now=100.1)


@pytest.mark.parametrize(
    "forged",
    [
        replace(GRANT, lease=LeaseId("other")),
        replace(GRANT, generation=4),
        replace(GRANT, reader=InstanceRef(READER.instance, Incarnation("c"))),
        replace(GRANT, reader=InstanceRef(InstanceId("decode-1"), READER.incarnation)),
        replace(GRANT, token="ffffffff." + GRANT.token.partition(".")[2]),
    ],
)
def test_a_grant_changed_in_any_part_is_not_known(forged: object) -> None:
    with pytest.raises(KVUnknownLease):
        TOKENS.check(forged, now=0.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "other",
    [TransferTokens(b"guess", ISSUER), TransferTokens(b"secret", READER), TransferTokens(b"", ISSUER)],
)
def test_another_secret_or_issuer_does_not_pass(other: TransferTokens) -> None:
    with pytest.raises(KVUnknownLease):
        other.check(GRANT, now=0.0)


def test_names_that_join_to_the_same_text_differ() -> None:
    left = TOKENS.grant(LeaseId("l"), 1, InstanceRef(InstanceId("ab"), Incarnation("c")), 10.0)
    right = TOKENS.grant(LeaseId("l"), 1, InstanceRef(InstanceId("a"), Incarnation("bc")), 10.0)
    assert left.token != right.token


@given(st.text())
def test_garbage_is_refused_and_nothing_else(token: str) -> None:
    with pytest.raises(KVTransferError):
        TOKENS.check(replace(GRANT, token=token), now=0.0)
