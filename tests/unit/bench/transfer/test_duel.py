"""What is read of ucx_perftest's output, and how a duel is judged."""

import pytest

from bench.transfer.duel import Duel, DuelFailed, overall_rate

CSV = ",0.050,281.630,281.630,1248.32,1248.32,3551,3551"
"""What followed the number of messages in a line of `ucx_perftest -f -v` (UCX 1.13)."""


def test_the_overall_bandwidth_is_in_mebibytes() -> None:
    assert overall_rate(CSV) == pytest.approx(1248.32 * 2**20)
    assert overall_rate(CSV) == pytest.approx(368_640 / 281.630e-6, rel=1e-4)  # of messages of that size


@pytest.mark.parametrize("line", ["", ",1,2", ",a,b,c,d,e,f,g"])
def test_another_output_is_an_error(line: str) -> None:
    with pytest.raises(DuelFailed):
        overall_rate(line)


def test_ours_counts_over_theirs() -> None:
    assert Duel(ours=4e9, perftest=5e9).ratio == pytest.approx(0.8)
