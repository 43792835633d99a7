"""Which decode may serve which prefill, beyond what layout and weights allow: a router's setting. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from common.ids import InstanceId


class Pairs:
    """From names or glob patterns of prefills to those of the decodes that each may hand over to.

    A prefill under several patterns may use the decodes of all of them; one under none is not restricted.
    """

    def __init__(self, allowed: Mapping[str, Sequence[str]]) -> None:
        self._allowed = {prefill: tuple(decodes) for prefill, decodes in allowed.items()}

    def allow(self, prefill: InstanceId, decode: InstanceId) -> bool:
        found = [decodes for name, decodes in self._allowed.items() if fnmatchcase(prefill, name)]
        return not found or any(fnmatchcase(decode, name) for decodes in found for name in decodes)

    def unknown(self, prefills: Iterable[InstanceId], decodes: Iterable[InstanceId]) -> list[str]:
        """The patterns that fit none of these instances: misspelt, or not started yet."""
        have_prefills, have_decodes = list(prefills), list(decodes)
        wanted = sorted({name for names in self._allowed.values() for name in names})
        missing = [name for name in self._allowed if not _fits(name, have_prefills)]
        return missing + [name for name in wanted if not _fits(name, have_decodes)]


def _fits(pattern: str, names: Iterable[InstanceId]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names)
