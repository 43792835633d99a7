"""Identities: the NewTypes that keep one id from being passed for another, and where new ids come from.

Knows nothing of what the ids stand for. Randomness comes from outside, so that a whole cluster can be
replayed from one seed.
"""

import random
import secrets
from typing import NamedTuple, NewType, Protocol

RequestId = NewType("RequestId", str)
"""Internal id of one client request: always unique, never the client's own X-Request-Id."""
InstanceId = NewType("InstanceId", str)
"""Name of a worker, router or gateway; doubles as a NATS subject token (no dots, no spaces)."""
Incarnation = NewType("Incarnation", str)
"""One run of an instance's process; a restart under the same name is a new incarnation."""
LeaseId = NewType("LeaseId", str)
SequenceId = NewType("SequenceId", int)
"""Engine-local number of a sequence; never leaves the process."""
BlockId = NewType("BlockId", int)
"""Index of a KV block in this process's pool; never leaves the process."""


class AttemptKey(NamedTuple):
    """What a job, handoff, frame item or abort speaks about; the gateway alone makes new attempts.

    Attempt numbers start at 1 and never repeat within a request; choices start at 0.
    """

    request: RequestId
    attempt: int
    choice: int


class InstanceRef(NamedTuple):
    """One incarnation of one instance: what a lease, a token or a death is tied to."""

    instance: InstanceId
    incarnation: Incarnation


class IdSource(Protocol):
    """Where fresh ids and seeds come from; injected so that no order depends on global randomness."""

    def hex(self, nbytes: int = 8) -> str: ...

    def uint63(self) -> int: ...


class SystemIds:
    """Ids from the operating system's randomness."""

    def hex(self, nbytes: int = 8) -> str:
        return secrets.token_hex(nbytes)

    def uint63(self) -> int:
        return secrets.randbits(63)


class SeededIds:
    """Replayable ids from one seed, for simulation and tests."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def hex(self, nbytes: int = 8) -> str:
        return self._random.randbytes(nbytes).hex()

    def uint63(self) -> int:
        return self._random.getrandbits(63)
