"""Frames are numbered without gaps, kept until acknowledged, and repeated unchanged."""

from hypothesis import given
from hypothesis import strategies as st

from common.ids import AttemptKey, Incarnation, InstanceId, InstanceRef, RequestId
from common.messages.stream import Frame, TokensItem
from common.runtime.outbox import Outbox

ME = InstanceRef(InstanceId("decode-0"), Incarnation("a"))
G0, G1 = InstanceId("gateway-0"), InstanceId("gateway-1")


def item(index: int) -> TokensItem:
    return TokensItem(AttemptKey(RequestId("r"), 1, 0), index, (7,))


def test_one_frame_per_gateway_and_flush() -> None:
    outbox = Outbox(ME)
    outbox.put(G0, item(0))
    outbox.put(G1, item(1))
    outbox.put(G0, item(2))
    frames = dict(outbox.flush())
    assert frames[G0] == Frame(ME.instance, ME.incarnation, 1, (item(0), item(2)))
    assert frames[G1] == Frame(ME.instance, ME.incarnation, 1, (item(1),))
    assert outbox.flush() == []
    assert outbox.last_numbers() == ((G0, 1), (G1, 1))


def test_a_gateway_that_is_forgotten_starts_from_nothing() -> None:
    outbox = Outbox(ME)
    outbox.put(G0, item(0))
    outbox.flush()
    outbox.forget(G0)
    assert outbox.kept(G0, (1,)) == []
    assert outbox.last_numbers() == ()


def test_a_gateway_that_never_acknowledges_is_overdue() -> None:
    outbox = Outbox(ME, max_kept=3)
    for index in range(4):
        outbox.put(G0, item(index))
        outbox.flush()
    assert outbox.overdue() == [G0]
    outbox.acknowledge(G0, 2)
    assert outbox.overdue() == []


@given(st.lists(st.one_of(st.just("put"), st.just("flush"), st.integers(0, 30)), max_size=80))
def test_whatever_is_lost_can_be_had_again_until_acknowledged(steps: list[str | int]) -> None:
    outbox = Outbox(ME)
    sent: dict[int, Frame] = {}
    acknowledged = count = 0
    for step in steps:
        if step == "put":
            outbox.put(G0, item(count))
            count += 1
        elif step == "flush":
            sent |= {frame.number: frame for _, frame in outbox.flush()}
        elif isinstance(step, int) and step in sent:
            outbox.acknowledge(G0, step)
            acknowledged = max(acknowledged, step)
        wanted = tuple(range(1, 40))
        expected = [frame for number, frame in sent.items() if number > acknowledged]
        assert outbox.kept(G0, wanted) == expected
    sent |= {frame.number: frame for _, frame in outbox.flush()}
    assert sorted(sent) == list(range(1, len(sent) + 1))
    assert [i for n in sorted(sent) for i in sent[n].items] == [item(i) for i in range(count)]
