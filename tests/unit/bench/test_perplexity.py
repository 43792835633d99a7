"""Text, windows and the verdict; no model is loaded."""

import math

import pytest

from bench.benches.perplexity import WINDOW, WINDOWS, outcome, windows
from bench.corpus import SHORTEST, docstrings, standard_library_docstrings

LONG = "Words. " * SHORTEST


def test_docstrings_come_in_the_order_of_their_lines_without_indentation() -> None:
    source = (
        f'"""Module. {LONG}"""\nclass A:\n    """Class. {LONG}"""\n    def f(self):\n        """Short."""\n'
    )
    source += f'    async def g(self):\n        """Method. {LONG}\n\n        More."""\n'
    found = list(docstrings(source))
    assert [text.split()[0] for text in found] == ["Module.", "Class.", "Method."]
    assert found[2].endswith("\n\nMore.")


def test_the_standard_library_has_text_enough_and_always_the_same() -> None:
    texts = standard_library_docstrings()
    first = [next(texts) for _ in range(20)]
    assert sum(map(len, first)) > 4000
    again = standard_library_docstrings()
    assert [next(again) for _ in range(20)] == first


def test_windows_are_whole_and_do_not_overlap() -> None:
    cut = windows(range(WINDOWS * WINDOW + 5))
    assert [len(window) for window in cut] == [WINDOW] * WINDOWS
    assert [token for window in cut for token in window] == list(range(WINDOWS * WINDOW))


def test_too_little_text_is_refused() -> None:
    with pytest.raises(ValueError, match="fewer"):
        windows(range(WINDOWS * WINDOW - 1))


def test_perplexity_is_the_exponential_of_the_mean_surprise() -> None:
    result = outcome([-1.0, -3.0], [-2.0, -2.001])
    assert result.figures["perplexity"] == pytest.approx(math.exp(2))
    assert result.figures["perplexity_difference_percent"] == pytest.approx(-0.05, abs=1e-3)
    assert result.figures["logprob_difference_mean"] == pytest.approx(0.9995)
    assert result.problems == ()


@pytest.mark.parametrize("shift", [0.006, -0.006])
def test_more_than_half_a_percent_either_way_is_a_failure(shift: float) -> None:
    assert outcome([-2.0 - shift], [-2.0]).problems
