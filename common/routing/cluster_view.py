"""Who is in the cluster, alive or not, and how loaded: built from beats alone.

Pure: no I/O, time from a Clock. Knows nothing of subjects, and not of which instance is best
(policies/, rules.py).
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal

from common.clock import Clock
from common.ids import InstanceId, InstanceRef
from common.messages.cluster import MESSAGE_VERSION, Beat, InstanceInfo, LoadReport, Role, WorkerBeat
from common.routing.heard_time import HeardTime

SUSPECT_AFTER_S = 0.6
DEAD_AFTER_S = 3.0
FORGET_AFTER_S = 600.0

State = Literal["unknown", "alive", "suspect", "dead"]


@dataclass(slots=True, eq=False)
class Instance:
    """One incarnation as last heard of, and what was assigned to it since."""

    info: InstanceInfo
    load: LoadReport
    heard_at: float
    """Heard time of its last beat."""
    assigned_tokens: int = 0
    assigned_to_compute: int = 0
    """Those of `assigned_tokens` that it has not cached and will not pull, as far as is known."""
    assigned_requests: int = 0
    last_assigned: int = 0
    """Number of the view's assignment that it got last; 0 for none."""
    gone: bool = False
    mourned: bool = False
    """Its death was reported by `deaths`."""

    @property
    def ref(self) -> InstanceRef:
        return self.info.ref

    @property
    def tokens(self) -> int:
        """KV tokens it holds or has still to compute, assignments of the last moment included."""
        return self.load.queued_tokens + self.load.running_tokens + self.assigned_tokens

    @property
    def tokens_to_compute(self) -> int:
        """Prompt tokens it has still to compute, assignments of the last moment included.

        None of those who wait for KV, though the KV pool may lack some.
        """
        return self.load.queued_tokens - self.load.waiting_tokens + self.assigned_to_compute

    @property
    def requests(self) -> int:
        """Requests it has, in whatever stage, assignments of the last moment included."""
        load = self.load
        held = load.requests_queued + load.requests_running + load.requests_waiting_for_kv
        return held + self.assigned_requests

    @property
    def idle(self) -> bool:
        """It has nothing to do, as far as is known."""
        return not self.requests and not self.tokens


@dataclass(slots=True, eq=False)
class _Name:
    """What is known under one instance name: the current incarnation and those that it replaced."""

    current: Instance
    replaced: dict[InstanceRef, Instance] = field(default_factory=dict)


class ClusterView:
    """States of every incarnation, where silence is counted in heard time (heard_time.py):

    | state   | becomes | when |
    |---------|---------|------|
    | unknown | alive   | its first beat |
    | alive   | suspect | silent for 0.6 s: no new work unless all are |
    | suspect | dead    | silent for 3 s |
    | alive, suspect | dead | `note_gone`: nobody answers on its subjects any more |
    | suspect, dead  | alive | it beats again; what was taken from it stays taken |
    | alive, suspect, dead | dead for good | another incarnation of its name beats |
    | dead    | unknown | dead for 10 minutes, or the name's 16th predecessor |

    Each time an incarnation becomes dead, `deaths` reports it once. The owner passes in every beat that the
    bus delivers, its own included: they show that the bus is alive, so that the owner's own outage kills
    nobody.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._heard = HeardTime(SUSPECT_AFTER_S, clock.now())
        self._names: dict[InstanceId, _Name] = {}
        self._assignments = 0

    # --- what happens -----------------------------------------------------------------------------

    def observe(self, beat: Beat) -> None:
        """Take in a beat. A late one of a replaced incarnation changes nothing."""
        now = self._clock.now()
        self._heard.heard(now)
        load = beat.load if isinstance(beat, WorkerBeat) else LoadReport()
        fresh = Instance(beat.info, load, self._heard.at(now))
        name = self._names.get(beat.info.ref.instance)
        if name is None:
            self._names[beat.info.ref.instance] = _Name(fresh)
            return
        if beat.info.ref in name.replaced:
            return
        if name.current.ref == beat.info.ref:
            fresh.last_assigned = name.current.last_assigned
        else:
            name.replaced[name.current.ref] = name.current
        name.current = fresh

    def note_assignment(self, ref: InstanceRef, tokens: int, to_compute: int | None = None) -> None:
        """Count work given to `ref` into its load until its next beat, which speaks for itself.

        `to_compute` of its `tokens`, all unless said, are neither cached there nor pulled.
        """
        instance = self.get(ref)
        if instance is None:
            return
        self._assignments += 1
        instance.assigned_tokens += tokens
        instance.assigned_to_compute += tokens if to_compute is None else to_compute
        instance.assigned_requests += 1
        instance.last_assigned = self._assignments

    def note_gone(self, ref: InstanceRef) -> None:
        """Its process is known to be gone (no responders); a beat brings it back."""
        instance = self.get(ref)
        if instance is not None:
            instance.gone = True

    def disconnected(self) -> None:
        """The owner lost the bus: silence does not count from here on."""
        self._heard.pause(self._clock.now())

    def reconnected(self) -> None:
        self._heard.resume(self._clock.now())

    def on_bus_state(self, connected: bool) -> None:
        """`disconnected` or `reconnected`, as a listener of the bus's state."""
        if connected:
            self.reconnected()
        else:
            self.disconnected()

    def deaths(self, now: float) -> list[InstanceRef]:
        """Incarnations that died and were not reported yet; `now` is the clock's. Forgets the long dead."""
        dead: list[InstanceRef] = []
        heard = self._heard.at(now)
        for name in list(self._names.values()):
            for instance in (*name.replaced.values(), name.current):
                if not instance.mourned and self._state(instance, heard) == "dead":
                    instance.mourned = True
                    dead.append(instance.ref)
            self._forget(name, heard)
        return dead

    # --- what is known ----------------------------------------------------------------------------

    def get(self, ref: InstanceRef) -> Instance | None:
        """The current incarnation of its name if it is `ref`; dead or alive."""
        name = self._names.get(ref.instance)
        return name.current if name is not None and name.current.ref == ref else None

    def state(self, ref: InstanceRef) -> State:
        name = self._names.get(ref.instance)
        if name is None:
            return "unknown"
        instance = name.current if name.current.ref == ref else name.replaced.get(ref)
        return "unknown" if instance is None else self._state(instance, self._heard.at(self._clock.now()))

    def silence(self, ref: InstanceRef) -> float:
        """Heard seconds since its last beat; infinite for unknown and replaced ones."""
        instance = self.get(ref)
        return float("inf") if instance is None else self._heard.at(self._clock.now()) - instance.heard_at

    def all(self) -> list[Instance]:
        """The current incarnation of every known name, in order of name; for people."""
        return [self._names[name].current for name in sorted(self._names)]

    def instances(self, role: Role, exclude: Collection[InstanceRef] = ()) -> list[Instance]:
        """Those that may get new work, by name: ready, not draining, of our message version, and alive.

        Only when nobody is alive, the suspect ones: on a busy machine a beat may be late, and whoever is
        asked in vain is excluded by the asker soon.
        """
        fit = [
            instance
            for instance in self.all()
            if instance.info.role == role
            and instance.ref not in exclude
            and instance.info.ready
            and not instance.info.draining
            and _speaks(instance.info, MESSAGE_VERSION)
        ]
        alive = [instance for instance in fit if self.state(instance.ref) == "alive"]
        return alive or [instance for instance in fit if self.state(instance.ref) == "suspect"]

    def _state(self, instance: Instance, heard: float) -> State:
        silence = heard - instance.heard_at
        if instance is not self._names[instance.ref.instance].current or instance.gone:
            return "dead"
        if silence >= DEAD_AFTER_S:
            return "dead"
        return "suspect" if silence >= SUSPECT_AFTER_S else "alive"

    def _forget(self, name: _Name, heard: float) -> None:
        for ref in list(name.replaced)[:-15]:
            del name.replaced[ref]
        if name.current.mourned and heard - name.current.heard_at >= FORGET_AFTER_S:
            del self._names[name.current.ref.instance]


def pairable(one: InstanceInfo, other: InstanceInfo) -> bool:
    """Whether KV may travel between two workers: equal layout and weights, overlapping message versions."""
    return (
        one.fingerprint == other.fingerprint
        and one.versions[0] <= other.versions[1]
        and other.versions[0] <= one.versions[1]
    )


def _speaks(info: InstanceInfo, version: int) -> bool:
    return info.versions[0] <= version <= info.versions[1]
