"""The control messages of a KV pull as bytes: a fixed header, and a body whose length the header states.

Tag 0 of an endpoint carries these messages in both directions; each block travels on a tag of its own,
`data_tag(pull, index)`. Every block that a reader asks for is answered by exactly one message on that tag:
its bytes, or nothing (length 0) once the pull is refused or cancelled, so that a posted receive always
ends. The empty answers need no kind: a pull counts only once FINAL was read.

| kind | from | first, count | body |
|---|---|---|---|
| OPEN | reader | 0, blocks it expects | `Open` |
| ASK | reader | the range of blocks wanted | |
| ASK_FINAL | reader, when it holds every block | | |
| ACK | reader: it has FINAL, free the lease | | |
| CANCEL | reader: send no more of this pull | | |
| PENDING | exporter: alive, nothing ready yet | | |
| FINAL | exporter | | `FinalResult` |
| ACKED | exporter: the lease is gone | | |
| UNKNOWN, REVOKED, MISMATCH | exporter: refused, the pull is over | | why, as text |

Knows nothing of endpoints, leases and blocks. See docs/protocol.md.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar

from common.errors import KVMismatch, KVRevoked, KVTransferError, KVUnknownLease, MessageInvalid
from common.kv.codec import PLAIN
from common.messages.handoff import LeaseGrant
from common.messages.stream import FinishReason, PrefillStats, TokenLogprobs

CONTROL_TAG = 0
WIRE_VERSION = 1
MAX_BODY_BYTES = 1 << 20
MAX_PULL_ID = (1 << 24) - 1
MAX_BLOCKS = 1 << 16
"""Blocks of one lease; with a pull's id they make a tag of 40 bits."""
WINDOW = 32
"""Blocks that a pull may have asked for and not yet received."""

_MAGIC = b"GLKV"
_HEADER = struct.Struct(">4sHBxIIII")
HEADER_BYTES = _HEADER.size


class Kind(IntEnum):
    OPEN = 1
    ASK = 2
    ASK_FINAL = 3
    ACK = 4
    CANCEL = 5
    PENDING = 16
    FINAL = 17
    ACKED = 18
    UNKNOWN = 32
    REVOKED = 33
    MISMATCH = 34


@dataclass(frozen=True, slots=True)
class WireMessage:
    """One control message. `pull` is 1..MAX_PULL_ID and never used twice on one endpoint."""

    kind: Kind
    pull: int
    first: int = 0
    count: int = 0
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Open:
    """Body of OPEN: who reads what, which KV it can make use of, and as what the blocks shall come."""

    KIND: ClassVar[str] = "kv.open"
    grant: LeaseGrant
    fingerprint: str
    compression: str = PLAIN


@dataclass(frozen=True, slots=True)
class FirstToken:
    """What prefill sampled for one choice. `finish` None: decode goes on from here."""

    choice: int
    token: int
    logprobs: TokenLogprobs | None = None
    finish: FinishReason | None = None
    stop_token: int | None = None


@dataclass(frozen=True, slots=True)
class FinalResult:
    """Body of FINAL: the KV is complete, and this is what came out of it.

    `age_s` is how long ago prefill was done when this was sent: the part of the transfer that the request
    had to wait for, told as a duration because clocks differ.
    """

    KIND: ClassVar[str] = "kv.final"
    choices: tuple[FirstToken, ...]
    prefill: PrefillStats | None = None
    age_s: float = 0.0


REFUSALS: dict[Kind, type[KVTransferError]] = {
    Kind.UNKNOWN: KVUnknownLease,
    Kind.REVOKED: KVRevoked,
    Kind.MISMATCH: KVMismatch,
}


def data_tag(pull: int, index: int) -> int:
    """Tag of the lease's block `index` in this pull; below 2**40 and never CONTROL_TAG."""
    return pull << 16 | index


def refusal(pull: int, error: KVTransferError) -> WireMessage:
    """The message that tells the reader of `pull` why it is over."""
    kind = next((kind for kind, cls in REFUSALS.items() if isinstance(error, cls)), Kind.REVOKED)
    return WireMessage(kind, pull, body=error.message.encode()[:500])


def refused(message: WireMessage) -> KVTransferError:
    """The error that a refusal stands for."""
    return REFUSALS[message.kind](message.body.decode(errors="replace"))


def encode_header(message: WireMessage) -> bytes:
    """HEADER_BYTES bytes. Raises MessageInvalid for a body above MAX_BODY_BYTES."""
    if len(message.body) > MAX_BODY_BYTES:
        raise MessageInvalid(f"{message.kind.name} of {len(message.body)} bytes is above {MAX_BODY_BYTES}")
    return _HEADER.pack(
        _MAGIC, WIRE_VERSION, message.kind, message.pull, message.first, message.count, len(message.body)
    )


def decode_header(data: bytes) -> tuple[WireMessage, int]:
    """A message without its body, and the body's length. Raises MessageInvalid."""
    if len(data) != HEADER_BYTES:
        raise MessageInvalid(f"a header has {HEADER_BYTES} bytes, not {len(data)}")
    magic, version, kind, pull, first, count, body_bytes = _HEADER.unpack(data)
    if magic != _MAGIC:
        raise MessageInvalid(f"not a KV control message: {magic!r}")
    if version != WIRE_VERSION:
        raise MessageInvalid(f"KV wire version {version}, this process speaks {WIRE_VERSION}")
    if body_bytes > MAX_BODY_BYTES:
        raise MessageInvalid(f"a body of {body_bytes} bytes is above {MAX_BODY_BYTES}")
    if not 1 <= pull <= MAX_PULL_ID:
        raise MessageInvalid(f"pull {pull} is not one of 1..{MAX_PULL_ID}")
    if first + count > MAX_BLOCKS:
        raise MessageInvalid(f"blocks {first}..{first + count} are above {MAX_BLOCKS}")
    try:
        return WireMessage(Kind(kind), pull, first, count), body_bytes
    except ValueError:
        raise MessageInvalid(f"unknown kind {kind}") from None
