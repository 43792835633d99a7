"""ClusterView against a model of a few lines, under random beats, silences, restarts and outages."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from common.clock import VirtualClock
from common.ids import InstanceRef
from common.routing.cluster_view import ClusterView
from tests.support.fleet import gateway_beat, ref, worker_beat

NAMES = st.sampled_from(["d1", "d2", "d3"])
TICK_S = 0.25
"""Exact in binary, so that the model's sums are the view's."""


class Membership(RuleBasedStateMachine):
    """Silence is counted in ticks of own beats heard, which the view has to find out from the beats alone."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = VirtualClock(50.0)
        self.view = ClusterView(self.clock)
        self.view.observe(gateway_beat())
        self.silent: dict[InstanceRef, float] = {}
        self.current: dict[str, int] = {}
        self.replaced: set[InstanceRef] = set()
        self.gone: set[InstanceRef] = set()
        self.reported: set[InstanceRef] = set()

    @rule(name=NAMES)
    def beat(self, name: str) -> None:
        this = ref(name, str(self.current.setdefault(name, 1)))
        self.view.observe(worker_beat(name, incarnation=this.incarnation))
        self.silent[this] = 0.0
        self.gone.discard(this)
        self.reported.discard(this)

    @rule(name=NAMES)
    def restart(self, name: str) -> None:
        old = ref(name, str(self.current.setdefault(name, 1)))
        self.current[name] += 1
        if old in self.silent:
            self.replaced.add(old)
        self.beat(name)

    @rule(name=NAMES)
    def late_beat_of_a_replaced_one(self, name: str) -> None:
        for old in sorted(self.replaced):
            if old.instance == name:
                self.view.observe(worker_beat(name, incarnation=old.incarnation))

    @rule(name=NAMES)
    def no_responders(self, name: str) -> None:
        this = ref(name, str(self.current.get(name, 1)))
        self.view.note_gone(this)
        if this in self.silent:
            self.gone.add(this)

    @rule(ticks=st.integers(1, 20))
    def time_passes(self, ticks: int) -> None:
        for _ in range(ticks):
            self.clock.advance(TICK_S)
            self.view.observe(gateway_beat())
        for this in self.silent:
            self.silent[this] += ticks * TICK_S

    @rule(seconds=st.integers(0, 100))
    def known_outage(self, seconds: int) -> None:
        self.view.disconnected()
        self.clock.advance(seconds)
        self.view.reconnected()

    @rule()
    def take_deaths(self) -> None:
        dead = self.view.deaths(self.clock.now())
        assert len(set(dead)) == len(dead)
        assert set(dead) == {this for this in self.silent if self.expected(this) == "dead"} - self.reported
        self.reported |= set(dead)

    @invariant()
    def states_are_the_model_s(self) -> None:
        for this in self.silent:
            assert self.view.state(this) == self.expected(this)
        alive = sorted(this for this in self.silent if self.expected(this) == "alive")
        suspect = sorted(this for this in self.silent if self.expected(this) == "suspect")
        assert [one.ref for one in self.view.instances("decode")] == (alive or suspect)

    def expected(self, this: InstanceRef) -> str:
        silence = self.silent[this]
        if this in self.replaced or this in self.gone or silence >= 3.0:
            return "dead"
        return "suspect" if silence >= 0.6 else "alive"


Membership.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestMembership = Membership.TestCase
