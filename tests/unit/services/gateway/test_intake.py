"""Frame numbers and token indices: whatever is lost, doubled or late, in the end each is there once."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from common.ids import AttemptKey, Incarnation, InstanceId, InstanceRef, RequestId
from common.messages.stream import FinishItem, Frame, TokenLogprobs, TokensItem
from services.gateway.intake import FrameIntake
from services.gateway.output import OutputTokens

W = InstanceRef(InstanceId("w"), Incarnation("1"))
KEY = AttemptKey(RequestId("r"), 1, 0)


def frame(number: int, ref: InstanceRef = W) -> Frame:
    return Frame(ref.instance, ref.incarnation, number, ())


def test_a_gap_is_asked_for_until_it_is_closed() -> None:
    intake = FrameIntake()
    assert intake.take(frame(1))
    assert intake.take(frame(4))
    assert not intake.take(frame(4))
    assert intake.missing(W, 5) == (2, 3, 5)
    assert intake.received() == ((W, 1),)
    assert intake.take(frame(3))
    assert intake.missing(W, 5) == (2, 5)
    assert intake.take(frame(2))
    assert intake.received() == ((W, 4),)
    assert not intake.take(frame(1))


def test_a_new_incarnation_starts_at_one() -> None:
    intake = FrameIntake()
    reborn = InstanceRef(W.instance, Incarnation("2"))
    assert intake.take(frame(1))
    assert intake.take(frame(1, reborn))
    assert dict(intake.received()) == {W: 1, reborn: 1}
    intake.replaced_by(reborn)
    assert dict(intake.received()) == {reborn: 1}


def test_everything_is_bounded() -> None:
    intake = FrameIntake(max_lanes=2, max_asked=3, give_up=2)
    assert intake.missing(W, 100) == (1, 2, 3)
    assert intake.missing(W, 100) == (1, 2, 3)
    assert intake.missing(W, 100) == (2, 3, 4)  # frame 1 is gone for ever
    for name in ("a", "b", "c"):
        intake.take(frame(1, InstanceRef(InstanceId(name), Incarnation("1"))))
    assert [ref.instance for ref, _ in intake.received()] == ["b", "c"]


@given(st.permutations(range(1, 9)), st.lists(st.integers(1, 8), max_size=8))
def test_any_order_and_any_repeats(order: list[int], repeats: list[int]) -> None:
    intake = FrameIntake()
    taken = [number for number in [*order, *repeats] if intake.take(frame(number))]
    assert taken == order
    assert intake.received() == ((W, 8),)
    assert intake.missing(W, 8) == ()


@st.composite
def slices(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Pieces [start, stop) of ten tokens, overlapping and in any order, that leave no token out."""
    cuts = [0, *sorted(draw(st.sets(st.integers(1, 9)))), 10]
    cover = list(itertools.pairwise(cuts))
    extra = draw(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 10)).filter(lambda p: p[0] < p[1])))
    return draw(st.permutations([*cover, *extra]))


@given(slices())
def test_tokens_in_pieces_come_out_in_order_and_once(pieces: list[tuple[int, int]]) -> None:
    output = OutputTokens(limit=10)
    output.end(FinishItem(KEY, "length", 10))
    ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    for start, stop in pieces:
        assert (output.finish is None) == (len(ids) < 10)
        values = tuple(TokenLogprobs(-float(index), ()) for index in range(start, stop))
        more, with_logprobs = output.add(TokensItem(KEY, start, tuple(range(start, stop)), values))
        ids += more
        logprobs += with_logprobs
    assert ids == output.ids == list(range(10))
    assert [entry.logprob for entry in logprobs] == [-float(index) for index in range(10)]
    assert output.finish is not None


def test_no_more_tokens_than_were_asked_for() -> None:
    output = OutputTokens(limit=3)
    assert output.add(TokensItem(KEY, 0, (5, 6, 7, 8)))[0] == (5, 6, 7)
    assert output.add(TokensItem(KEY, 9, (1,)))[0] == ()
