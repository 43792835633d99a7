"""Stop strings: found across pieces, held back until certain, never shown."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.text import StopMatcher


def run(pieces: list[str], *stops: str, include: bool = False) -> tuple[str, bool]:
    matcher = StopMatcher(stops, include=include)
    text = "".join(matcher.feed(piece) for piece in pieces)
    return text + matcher.flush(), matcher.matched


def test_a_stop_across_pieces_leaks_nothing() -> None:
    matcher = StopMatcher(("DEFGHIJ",))
    assert [matcher.feed(piece) for piece in ("ABC D", "E", "FGH", "IJ K", "L")] == ["ABC ", "", "", "", ""]
    assert matcher.matched
    assert matcher.flush() == ""


def test_what_only_looked_like_a_stop_is_let_out() -> None:
    assert run(["ABC", "DE", "F"], "DEX") == ("ABCDEF", False)
    assert run(["ABC", "DE"], "DEX") == ("ABCDE", False)


def test_the_match_that_ends_first_wins() -> None:
    assert run(["abcX"], "abcX", "bc") == ("a", True)
    assert run(["a", "b", "c", "X"], "abcX", "bc") == ("a", True)


def test_the_longer_of_two_that_end_together() -> None:
    assert run(["xabc"], "bc", "abc") == ("x", True)


def test_an_overlap_with_itself() -> None:
    assert run(["a", "a", "a", "b"], "aab") == ("a", True)


def test_include_shows_the_match_and_no_more() -> None:
    assert run(["one. two"], ".", include=True) == ("one.", True)


def test_no_stops_hold_nothing_back() -> None:
    assert StopMatcher(()).feed("abc") == "abc"


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(("",))


letters = st.text(alphabet="ab", max_size=12)


@given(letters, st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=4), st.data())
def test_how_the_text_is_cut_does_not_matter(text: str, stops: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert run(pieces, *stops) == run([text], *stops) == reference(text, stops)


def reference(text: str, stops: list[str]) -> tuple[str, bool]:
    """Character by character, as the definition says."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], True
    return text, False
