"""The command line of `python -m bench goodput`: what is refused before anything is started."""

import argparse
from fractions import Fraction
from pathlib import Path

import pytest

from bench.benches import goodput
from bench.goodput.slo import Slo
from common.errors import ConfigError


def parsed(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    goodput.options(parser)
    return parser.parse_args(argv)


def test_a_plain_call_is_a_full_run_with_a_hundred_requests() -> None:
    comparison = goodput._comparison(parsed("--compare", "colocated,pooled", "--workload", "long-prompt"))
    assert [one.name for one in comparison.contestants] == ["colocated", "pooled"]
    assert (comparison.effort.name, comparison.effort.requests, comparison.fixed) == ("full", 100, ())
    assert (comparison.instances.prefill, comparison.instances.decode) == (1, 1)


def test_servers_of_others_come_with_fixed_slos() -> None:
    options = ("--against", "http://a:1,http://b:2/", "--ttft", "1.5", "--tpot", "0.08", "--quick")
    comparison = goodput._comparison(parsed("--compare", "disaggregated", "--workload", "chat", *options))
    assert comparison.contestants[-1].urls == ("http://a:1", "http://b:2")
    assert comparison.fixed == (Slo("fixed", 1.5, 0.08),)
    assert comparison.effort.name == "quick"


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--compare", "chunked,nothing"),
        ("--compare", "chunked", "--ttft", "1"),
        ("--compare", "chunked", "--requests", "50"),
        ("--compare", "chunked", "--trace", "/nowhere"),
    ],
)
def test_what_does_not_go_together_is_refused(options: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError):
        goodput._comparison(parsed("--workload", "chat", *options))


def test_a_trace_needs_its_file_and_may_be_scaled(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        goodput._comparison(parsed("--compare", "chunked", "--workload", "trace"))
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9,480,16\n2023-11-16 18:17:04.9,32,8\n"
    )
    arguments = parsed(
        "--compare", "chunked", "--workload", "trace", "--trace", str(path), "--length-scale", "1/16"
    )
    assert arguments.length_scale == Fraction(1, 16)
    load = goodput._comparison(arguments).workload.load(2, 0)
    assert [(shape.prompt_tokens, shape.output_tokens) for shape in load.shapes] == [(30, 1), (2, 1)]


@pytest.mark.parametrize(
    "options",
    [("--cv", "0"), ("--cv", "x"), ("--length-scale", "1/0"), ("--prefill", "0"), ("--cores", "999")],
)
def test_impossible_values_are_refused(options: tuple[str, str]) -> None:
    with pytest.raises(SystemExit):
        parsed("--workload", "chat", *options)
