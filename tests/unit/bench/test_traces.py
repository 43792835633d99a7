"""Traces: both public forms, scaling, and prompts that begin alike where the trace says so."""

from fractions import Fraction
from pathlib import Path

import pytest

from bench.traces import Trace, TraceRequest, read_trace
from common.errors import ConfigError

MOONCAKE = """\
{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48]}
{"timestamp": 24482, "input_length": 1000, "output_length": 500, "hash_ids": [46, 9]}
"""
AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
"""


def read(tmp_path: Path, text: str) -> Trace:
    path = tmp_path / "trace"
    path.write_text(text)
    return read_trace(path)


def test_mooncakes_form_is_read_in_order_of_time(tmp_path: Path) -> None:
    trace = read(tmp_path, MOONCAKE)
    assert trace.requests == (
        TraceRequest(0.0, 1000, 500, (46, 9)),
        TraceRequest(3.0, 6955, 52, (46, 47, 48)),
    )
    assert trace.block_tokens == 512


def test_azures_form_is_read(tmp_path: Path) -> None:
    first, second = read(tmp_path, AZURE).requests
    assert (first.at_s, first.prompt_tokens, first.output_tokens, first.blocks) == (0.0, 4808, 10, ())
    assert second.at_s == pytest.approx(0.052, abs=1e-6)


@pytest.mark.parametrize(
    "text", ["", "a,b\n1,2\n", '{"timestamp": 1}\n', "{", "TIMESTAMP,ContextTokens,GeneratedTokens\n"]
)
def test_any_other_file_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError):
        read(tmp_path, text)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        read_trace(tmp_path / "nowhere")


def test_lengths_and_times_are_scaled_and_blocks_with_them(tmp_path: Path) -> None:
    trace = read(tmp_path, MOONCAKE).scaled(length=Fraction(1, 16), time=0.5)
    assert [(r.at_s, r.prompt_tokens, r.output_tokens) for r in trace.requests] == [
        (0.0, 62, 31),
        (1.5, 435, 3),
    ]
    assert trace.block_tokens == 32


def test_a_scale_that_cuts_a_block_in_pieces_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="512"):
        read(tmp_path, MOONCAKE).scaled(length=Fraction(1, 1000))


def test_prompts_begin_alike_exactly_where_their_blocks_do(tmp_path: Path) -> None:
    trace = read(tmp_path, MOONCAKE).scaled(length=Fraction(1, 16))
    one, other = (trace.prompt(request, seed=1) for request in trace.requests)
    assert len(one) == 62
    assert len(other) == 435  # one more than its three blocks of 32 hold
    assert one[:32] == other[:32]
    assert one[32:62] != other[32:62]
    assert trace.prompt(trace.requests[0], seed=2)[:32] != one[:32]


def test_prompts_without_blocks_are_all_different(tmp_path: Path) -> None:
    trace = read(tmp_path, AZURE)
    one, other = (trace.prompt(request, seed=1) for request in trace.requests)
    assert (len(one), len(other)) == (4808, 3180)
    assert one[:100] != other[:100]


def test_a_part_goes_round_and_keeps_the_gaps() -> None:
    trace = Trace(tuple(TraceRequest(at, 10, 10) for at in (0.0, 1.0, 4.0)))
    assert trace.rate == pytest.approx(0.5)
    part = trace.part(1, 4)
    assert [request.at_s for request in part.requests] == pytest.approx([0.0, 3.0, 5.0, 6.0])
