"""The names of KV blocks: one hash per full block of a prompt, the same in every process.

A block is named by a BLAKE2b hash chained over (parent's name, its tokens) and keyed by model fingerprint and
cache salt, so that equal names mean equal KV and tenants with different salts never meet. The idea of
hashing full blocks with their prefix is vLLM's automatic prefix caching. Knows nothing of who holds a block.
"""

import hashlib
import struct
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from common.errors import MessageInvalid

HASH_BYTES = 16


class BlockHasher:
    """Names blocks of `block_size` tokens for one model; `fingerprint` covers KV layout and weights."""

    def __init__(self, fingerprint: str, block_size: int) -> None:
        self._fingerprint = fingerprint.encode()
        self._block_size = block_size
        self._pack = struct.Struct(f"<{block_size}q").pack

    def hashes(self, tokens: Seq[int], salt: str = "") -> list[bytes]:
        """The names of all full blocks of `tokens`, in order."""
        chain: list[bytes] = []
        self.extend(chain, tokens, salt, len(tokens) // self._block_size)
        return chain

    def extend(self, chain: list[bytes], tokens: Seq[int], salt: str, count: int) -> None:
        """Make `chain`, the names of the first blocks of `tokens`, at least `count` names long."""
        if len(chain) >= count:
            return
        size = self._block_size
        key = hashlib.blake2b(salt.encode(), key=self._fingerprint[:64], digest_size=32).digest()
        parent = chain[-1] if chain else b""
        for start in range(len(chain) * size, count * size, size):
            block = self._pack(*tokens[start : start + size])
            parent = hashlib.blake2b(parent + block, key=key, digest_size=HASH_BYTES).digest()
            chain.append(parent)


def pack(hashes: Iterable[bytes]) -> str:
    """Names as they travel: 32 hex digits each, one after the other."""
    return b"".join(hashes).hex()


def unpack(text: str) -> list[bytes]:
    """The names in `text`, in order. Raises MessageInvalid."""
    try:
        data = bytes.fromhex(text)
    except ValueError as error:
        raise MessageInvalid(f"names of blocks are hex digits: {error}") from None
    if len(data) % HASH_BYTES:
        raise MessageInvalid(f"names of blocks have {2 * HASH_BYTES} hex digits each")
    return [data[start : start + HASH_BYTES] for start in range(0, len(data), HASH_BYTES)]
