"""Whom one choice does not want to be routed to again, and why. Pure; knows nothing of routing."""

from common.ids import InstanceRef


class Exclusions:
    """Three lists of incarnations, in the order in which they were met.

    gone: dead, another incarnation by now, or without an answer; never asked again. refused: full or
    draining. failed: gave the attempt up, perhaps by no fault of its own: let in again when nobody else
    is left, because a failure never blacklists.
    """

    def __init__(self) -> None:
        self._gone: dict[InstanceRef, None] = {}
        self._refused: dict[InstanceRef, None] = {}
        self._failed: dict[InstanceRef, None] = {}
        self.full = False
        """Whether somebody would have taken the choice but for want of room."""

    @property
    def refs(self) -> tuple[InstanceRef, ...]:
        return (*self._gone, *self._refused, *self._failed)

    def gone(self, ref: InstanceRef) -> None:
        self._gone[ref] = None
        self._failed.pop(ref, None)

    def refused(self, ref: InstanceRef, reason: str) -> None:
        match reason:
            case "stale":
                self.gone(ref)
            case "aborted":
                self.failed(ref)  # it refuses that attempt, not the next
            case _:
                self.full = self.full or reason == "full"
                self._refused[ref] = None

    def failed(self, ref: InstanceRef) -> None:
        if ref not in self._gone:
            self._failed[ref] = None

    def readmit(self) -> bool:
        """Let those that only failed in again; False when there are none."""
        some = bool(self._failed)
        self._failed.clear()
        return some
