"""The queue of handoffs: the engine's order, and who leaves it by which door."""

import pytest

from common.engine.ordering import Fcfs, Priority
from common.engine.waiting import AGING, LEAST_TURN
from services.decode.handoff_queue import HandoffQueue
from tests.support.sequences import make_sequence


def test_the_order_is_the_engine_s() -> None:
    fcfs: HandoffQueue[str] = HandoffQueue(Fcfs())
    urgent: HandoffQueue[str] = HandoffQueue(Priority())
    for queue in (fcfs, urgent):
        queue.add("old", make_sequence(1, [1] * 5, arrival=1.0))
        queue.add("urgent", make_sequence(2, [1] * 7, arrival=2.0, priority=-1))
    assert (fcfs.next(), urgent.next()) == ("old", "urgent")
    assert (len(urgent), urgent.num_tokens) == (2, 12)


def test_an_item_leaves_once() -> None:
    queue: HandoffQueue[str] = HandoffQueue(Fcfs())
    for number, name in enumerate("abc"):
        queue.add(name, make_sequence(number, [1]))
    queue.discard("a")
    queue.discard("a")
    assert queue.next() == "b"
    queue.admit("b")
    queue.discard("b")
    queue.admit("c")
    assert (len(queue), queue.num_tokens) == (0, 0)
    with pytest.raises(IndexError):
        queue.next()


def test_nobody_waits_for_ever() -> None:
    queue: HandoffQueue[int] = HandoffQueue(Priority())
    queue.add(0, make_sequence(0, [1] * LEAST_TURN, priority=1))
    number = 0
    while queue.next() != 0:
        number += 1
        queue.add(number, make_sequence(number, [1] * LEAST_TURN))
        queue.admit(queue.next())
        assert number < 2 * AGING
        queue.add(number + 1000, make_sequence(number + 1000, [1] * LEAST_TURN))
