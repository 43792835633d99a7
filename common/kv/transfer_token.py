"""Transfer tokens: the proof that a reader may pull one generation of one lease.

HMAC-SHA256 (RFC 2104) by the cluster's secret over issuer, lease, generation, reader incarnation and
expiry. The exporter that issues a token is the one that checks it, so the expiry is on its own monotonic
clock and no two clocks are compared. Knows nothing of what the lease holds.
"""

import hashlib
import hmac

from common.errors import KVRevoked, KVUnknownLease
from common.ids import InstanceRef, LeaseId
from common.messages.handoff import LeaseGrant

_DIGEST_BYTES = 16


class TransferTokens:
    """Issues and checks the tokens of one exporter incarnation."""

    def __init__(self, secret: bytes, issuer: InstanceRef) -> None:
        self._secret = secret
        self._issuer = issuer

    def grant(self, lease: LeaseId, generation: int, reader: InstanceRef, expires: float) -> LeaseGrant:
        """The right of `reader` to pull, until `expires` (seconds on the issuer's clock)."""
        milliseconds = int(expires * 1000)
        token = f"{milliseconds:x}.{self._digest(lease, generation, reader, milliseconds)}"
        return LeaseGrant(lease, generation, reader, token)

    def check(self, grant: LeaseGrant, now: float) -> None:
        """Raises KVUnknownLease for a token that was never issued, KVRevoked for one that has expired.

        A forged token is told no more than that: not even whether the lease exists.
        """
        expiry, _, digest = grant.token.partition(".")
        milliseconds = _hex(expiry)
        if milliseconds is None or not digest.isascii():
            raise KVUnknownLease("this is not a transfer token")
        expected = self._digest(grant.lease, grant.generation, grant.reader, milliseconds)
        if not hmac.compare_digest(expected, digest):
            raise KVUnknownLease(
                "the transfer token was not issued here for this lease, generation and reader"
            )
        if now * 1000 > milliseconds:
            raise KVRevoked(f"the transfer token of lease {grant.lease} has expired")

    def _digest(self, lease: LeaseId, generation: int, reader: InstanceRef, milliseconds: int) -> str:
        parts = (*self._issuer, lease, str(generation), *reader, str(milliseconds))
        # Each part carries its length, so that no two different lists give the same bytes.
        message = b"".join(len(raw).to_bytes(4, "big") + raw for raw in map(str.encode, parts))
        return hmac.new(self._secret, message, hashlib.sha256).digest()[:_DIGEST_BYTES].hex()


def _hex(text: str) -> int | None:
    try:
        return int(text, 16) if len(text) <= 16 else None
    except ValueError:
        return None
