"""Workloads: lengths and gaps against theory, the same for all, contents fresh for each trial."""

from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from statistics import fmean, pstdev

import pytest

from bench.goodput.workload import MIXES, named, replayed
from common.errors import ConfigError

PAPER_MEANS = {"sharegpt": (755.5, 200.3), "humaneval": (171.3, 98.2), "longbench": (1738.3, 90.7)}


@pytest.mark.parametrize("name", PAPER_MEANS)
def test_the_papers_mixes_have_the_papers_means(name: str) -> None:
    shapes = named(name, 1.0).load(20_000, 3).shapes
    prompt, output = PAPER_MEANS[name]
    assert fmean(shape.prompt_tokens for shape in shapes) == pytest.approx(prompt, rel=0.04)
    assert fmean(shape.output_tokens for shape in shapes) == pytest.approx(output, rel=0.04)


def test_fixed_workloads_have_the_lengths_of_the_agreement() -> None:
    lengths = {
        name: (load.shapes[0].prompt_tokens, load.shapes[0].output_tokens)
        for name in MIXES
        if name not in PAPER_MEANS
        for load in [named(name, 1.0).load(1, 0)]
    }
    assert lengths == {
        "chat": (200, 150), "long-prompt": (512, 64), "very-long-prompt": (2048, 64), "thinking": (64, 1000)
    }  # fmt: skip


@pytest.mark.parametrize("cv", [1.0, 2.0])
def test_gaps_have_the_mean_of_the_rate_and_the_variation_asked_for(cv: float) -> None:
    arrivals = named("chat", cv).load(20_000, 1).arrivals(5.0)
    gaps = [after - before for before, after in pairwise([0.0, *arrivals])]
    assert fmean(gaps) == pytest.approx(0.2, rel=1e-9)
    assert pstdev(gaps) / fmean(gaps) == pytest.approx(cv, rel=0.05)
    if cv == 1.0:  # of an exponential distribution 1 - 1/e lie below the mean
        assert fmean(gap < 0.2 for gap in gaps) == pytest.approx(0.632, abs=0.02)


def test_gaps_are_the_same_at_every_rate_but_for_their_scale() -> None:
    load = named("chat", 1.0).load(50, 7)
    assert load.arrivals(4.0) == pytest.approx([time / 2 for time in load.arrivals(2.0)])
    assert load.arrivals(2.0)[-1] == pytest.approx(25.0)


def test_contents_are_fresh_for_each_trial_and_lengths_are_not() -> None:
    workload = named("sharegpt", 1.0)
    one, other = (workload.load(5, 0).specs(nonce) for nonce in ("a", "b"))
    assert [len(spec.prompt) for spec in one] == [len(spec.prompt) for spec in other]
    assert all(a.prompt[:8] != b.prompt[:8] for a, b in zip(one, other, strict=True))
    assert one[0].prompt[:4] != one[1].prompt[:4]


TRACE = """\
{"timestamp": 0, "input_length": 1000, "output_length": 320, "hash_ids": [1, 2]}
{"timestamp": 1000, "input_length": 1024, "output_length": 160, "hash_ids": [1, 3]}
{"timestamp": 4000, "input_length": 100, "output_length": 16, "hash_ids": [4]}
"""


def test_a_trace_keeps_its_rhythm_and_its_prefixes_at_another_rate(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(TRACE)
    load = replayed(path, Fraction(1, 16)).load(3, 0)
    first, second, third = load.arrivals(2.0)
    assert third == pytest.approx(1.5)  # three requests at two a second
    assert (third - second) / (second - first) == pytest.approx(3.0)
    one, other, _ = load.specs("a")
    assert [len(spec.prompt) for spec in load.specs("a")] == [62, 64, 6]
    assert [spec.max_tokens for spec in load.specs("a")] == [20, 10, 1]
    assert one.prompt[:32] == other.prompt[:32]
    assert one.prompt[32:40] != other.prompt[32:40]
    assert load.specs("b")[0].prompt[:32] != one.prompt[:32]


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        replayed(tmp_path / "nowhere", Fraction(1))
