"""ClusterView: its transition table, the owner's own outages, and what may get new work."""

from typing import Any

import pytest

from common.clock import VirtualClock
from common.messages.cluster import LoadReport, Role
from common.routing.cluster_view import ClusterView, pairable
from tests.support.fleet import gateway_beat, info, ref, worker_beat

BEAT_S = 0.2


class Watched:
    """A view whose own gateway beats echo five times a second."""

    def __init__(self) -> None:
        self.clock = VirtualClock(1000.0)
        self.view = ClusterView(self.clock)

    def pass_time(self, seconds: float, *also: str) -> None:
        """Let time pass; `also` are decodes that go on beating."""
        for _ in range(round(seconds / BEAT_S)):
            self.clock.advance(BEAT_S)
            self.view.observe(gateway_beat())
            for name in also:
                self.view.observe(worker_beat(name))

    def deaths(self) -> list[str]:
        return [dead.instance for dead in self.view.deaths(self.clock.now())]


@pytest.fixture
def watched() -> Watched:
    return Watched()


def test_silence_makes_suspect_then_dead_once(watched: Watched) -> None:
    view = watched.view
    assert view.state(ref("d1")) == "unknown"
    view.observe(worker_beat("d1"))
    assert view.state(ref("d1")) == "alive"
    watched.pass_time(0.4)
    assert view.state(ref("d1")) == "alive"
    watched.pass_time(0.4)
    assert view.state(ref("d1")) == "suspect"
    assert watched.deaths() == []
    watched.pass_time(2.4)
    assert view.state(ref("d1")) == "dead"
    assert watched.deaths() == ["d1"]
    assert watched.deaths() == []


def test_who_beats_again_gets_work_again_and_can_die_again(watched: Watched) -> None:
    watched.view.observe(worker_beat("d1"))
    watched.pass_time(4)
    assert watched.deaths() == ["d1"]
    watched.view.observe(worker_beat("d1"))
    assert watched.view.state(ref("d1")) == "alive"
    assert [one.ref for one in watched.view.instances("decode")] == [ref("d1")]
    watched.pass_time(4)
    assert watched.deaths() == ["d1"]


def test_a_restart_ends_the_old_incarnation_for_good(watched: Watched) -> None:
    view = watched.view
    view.observe(worker_beat("d1", incarnation="old"))
    view.observe(worker_beat("d1", incarnation="new"))
    assert view.state(ref("d1", "old")) == "dead"
    assert view.deaths(watched.clock.now()) == [ref("d1", "old")]
    view.observe(worker_beat("d1", incarnation="old"))
    assert view.state(ref("d1", "old")) == "dead"
    assert [one.ref for one in view.instances("decode")] == [ref("d1", "new")]
    assert view.deaths(watched.clock.now()) == []


def test_no_responders_is_death_until_it_beats(watched: Watched) -> None:
    watched.view.observe(worker_beat("d1"))
    watched.view.note_gone(ref("d1"))
    assert watched.view.state(ref("d1")) == "dead"
    assert watched.deaths() == ["d1"]
    watched.view.observe(worker_beat("d1"))
    assert watched.view.state(ref("d1")) == "alive"


@pytest.mark.parametrize("told", [True, False], ids=["told", "not told"])
def test_own_outage_kills_nobody(watched: Watched, told: bool) -> None:
    watched.view.observe(worker_beat("d1"))
    if told:
        watched.view.disconnected()
    watched.clock.advance(60)
    assert watched.deaths() == []
    if told:
        watched.view.reconnected()
    watched.view.observe(gateway_beat())
    assert watched.deaths() == []
    watched.pass_time(1.0, "d1")
    assert watched.view.state(ref("d1")) == "alive"


def test_a_known_outage_does_not_count_at_all(watched: Watched) -> None:
    watched.view.observe(worker_beat("d1"))
    watched.view.disconnected()
    watched.clock.advance(60)
    watched.view.reconnected()
    assert watched.view.silence(ref("d1")) == 0
    assert watched.view.state(ref("d1")) == "alive"


def test_who_died_during_an_outage_is_found_dead_after_it(watched: Watched) -> None:
    for name in ("d1", "d2"):
        watched.view.observe(worker_beat(name))
    watched.view.disconnected()
    watched.clock.advance(10)
    watched.view.reconnected()
    watched.pass_time(3.2, "d2")
    assert watched.deaths() == ["d1"]


def test_the_long_dead_are_forgotten(watched: Watched) -> None:
    watched.view.observe(worker_beat("d1"))
    watched.pass_time(4)
    assert watched.deaths() == ["d1"]
    watched.pass_time(600)
    assert watched.deaths() == []
    assert watched.view.state(ref("d1")) == "unknown"
    assert [one.ref.instance for one in watched.view.all()] == ["g1"]


def test_many_restarts_do_not_pile_up(watched: Watched) -> None:
    for number in range(100):
        watched.view.observe(worker_beat("d1", incarnation=f"i{number}"))
        watched.deaths()
    assert watched.view.state(ref("d1", "i99")) == "alive"
    assert watched.view.state(ref("d1", "i98")) == "dead"
    assert watched.view.state(ref("d1", "i1")) == "unknown"


@pytest.mark.parametrize(
    "changes",
    [{"draining": True}, {"ready": False}, {"versions": (2, 3)}],
    ids=["draining", "not ready", "newer"],
)
def test_who_gets_no_new_work(watched: Watched, changes: dict[str, Any]) -> None:
    watched.view.observe(worker_beat("d1", **changes))
    watched.view.observe(worker_beat("d2"))
    watched.view.observe(worker_beat("p1", "prefill"))
    assert [one.ref for one in watched.view.instances("decode")] == [ref("d2")]
    assert watched.view.instances("decode", exclude=[ref("d2")]) == []


def test_assignments_count_until_the_next_beat(watched: Watched) -> None:
    busy = LoadReport(queued_tokens=10, running_tokens=5)
    watched.view.observe(worker_beat("d1", load=busy))
    watched.view.note_assignment(ref("d1"), 100)
    watched.view.note_assignment(ref("d1"), 20)
    (one,) = watched.view.instances("decode")
    assert (one.tokens, one.assigned_requests) == (135, 2)
    watched.view.observe(worker_beat("d1", load=busy))
    (one,) = watched.view.instances("decode")
    assert (one.tokens, one.assigned_requests) == (15, 0)


def test_assignments_to_the_unknown_are_ignored(watched: Watched) -> None:
    watched.view.observe(worker_beat("d1", incarnation="new"))
    watched.view.note_assignment(ref("d1", "old"), 5)
    watched.view.note_assignment(ref("nobody"), 5)
    assert [one.tokens for one in watched.view.instances("decode")] == [0]


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ({}, {}, True),
        ({"fingerprint": "a"}, {"fingerprint": "b"}, False),
        ({"versions": (1, 2)}, {"versions": (2, 3)}, True),
        ({"versions": (1, 1)}, {"versions": (2, 3)}, False),
        ({"versions": (3, 3)}, {"versions": (1, 2)}, False),
    ],
)
def test_pairs_share_layout_weights_and_a_version(
    one: dict[str, Any], other: dict[str, Any], expected: bool
) -> None:
    roles: tuple[Role, Role] = ("prefill", "decode")
    assert pairable(info("p1", roles[0], **one), info("d1", roles[1], **other)) is expected
