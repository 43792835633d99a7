"""Frames are numbered without gaps, kept until acknowledged, and repeated unchanged."""

from hypothesis import given
from hypothesis import strategies as st

from common.ids import AttemptKey, Incarnation, InstanceId, InstanceRef, RequestId
from common.messages.codec import encode
from common.messages.stream import Frame, FrameItem, PromptItem, TokenLogprobs, TokensItem
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
    assert dict(outbox.last_numbers()) == {G0: 1, G1: 1}


def test_a_gateway_that_comes_back_from_the_dead_misses_no_number() -> None:
    outbox = Outbox(ME)
    for index in range(3):
        outbox.put(G0, item(index))
        outbox.flush()
    outbox.acknowledge(G0, 1)
    outbox.drop(G0)
    assert outbox.last_numbers() == ()
    outbox.put(G0, item(3))
    assert outbox.flush() == [(G0, Frame(ME.instance, ME.incarnation, 4, (item(3),)))]
    again = {frame.number: frame.items for frame in outbox.kept(G0, (2, 3, 4, 5))}
    assert again == {2: (), 3: (), 4: (item(3),)}


def test_what_is_acknowledged_is_not_announced() -> None:
    outbox = Outbox(ME)
    outbox.put(G0, item(0))
    outbox.flush()
    assert outbox.last_numbers() == ((G0, 1),)
    outbox.acknowledge(G0, 1)
    assert outbox.last_numbers() == ()


def test_gateways_that_are_long_gone_are_forgotten() -> None:
    outbox = Outbox(ME, max_lanes=2)
    for gateway in (G0, G1, G0, InstanceId("gateway-2")):
        outbox.put(gateway, item(0))
        outbox.flush()
    assert [gateway for gateway, _ in outbox.last_numbers()] == [G0, "gateway-2"]


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


def test_frames_with_many_log_probabilities_stay_below_what_nats_takes() -> None:
    top = tuple((140_000 + rank, -20.123456789012345 - rank) for rank in range(20))
    one = TokenLogprobs(-17.123456789012345, top)
    outbox = Outbox(ME)
    scores = [PromptItem(AttemptKey(RequestId("r"), 1, 0), 1 + 128 * n, (one,) * 128) for n in range(20)]
    items: list[FrameItem] = [item(0), *scores, item(1)]
    for each in items:
        outbox.put(G0, each)
    frames = [frame for _, frame in outbox.flush()]
    assert len(frames) > 1
    assert [frame.number for frame in frames] == list(range(1, len(frames) + 1))
    assert [each for frame in frames for each in frame.items] == items
    assert all(len(encode(frame)) < 1 << 19 for frame in frames)
    assert outbox.kept(G0, (2,)) == [frames[1]]
