"""The bytes that one vocabulary entry stands for, as logprobs report them.

Vocabularies spell bytes in one of two ways: GPT-2's printable stand-ins for all 256 bytes, or
sentencepiece's "▁" for a space and <0xE4> for a byte that is in no other piece. Pure.
"""

import re
from functools import cache

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"


def token_bytes(piece: str, *, byte_level: bool) -> bytes:
    """Bytes of a plain (not added) vocabulary entry; `byte_level` says that it is spelled GPT-2's way."""
    if byte_level:
        stand_ins = _stand_ins()
        return b"".join(bytes([stand_ins[c]]) if c in stand_ins else c.encode() for c in piece)
    if (match := _BYTE_PIECE.fullmatch(piece)) is not None:
        return bytes([int(match[1], 16)])
    return piece.replace(_SPACE, " ").encode()


@cache
def _stand_ins() -> dict[str, int]:
    """GPT-2's map: printable Latin-1 bytes stand for themselves, the others for U+0100 and up in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
