"""Arguments of `galley up`, and the command it offers to try."""

import json
import shlex

import pytest
import typer
from typer.testing import CliRunner

from cli.main import app
from cli.up import curl_line, parse_assignment


@pytest.mark.parametrize(
    ("text", "pair"),
    [
        ("NUM_BLOCKS=512", ("num_blocks", "512")),
        ("num-blocks=512", ("num_blocks", "512")),
        ("UCX__TLS=sm,tcp", ("ucx.tls", "sm,tcp")),
        ("model=/a=b", ("model", "/a=b")),
        ("served_model_name=", ("served_model_name", "")),
    ],
)
def test_assignments(text: str, pair: tuple[str, str]) -> None:
    assert parse_assignment(text) == pair


def test_what_is_no_assignment_is_refused() -> None:
    with pytest.raises(typer.BadParameter, match="'fast' is not KEY=VALUE"):
        parse_assignment("fast")


def test_the_curl_line_survives_the_shell() -> None:
    words = shlex.split(curl_line("http://127.0.0.1:8000", "it's a model"))
    assert words[:3] == ["curl", "-N", "http://127.0.0.1:8000/v1/chat/completions"]
    body = json.loads(words[words.index("-d") + 1])
    assert body["model"] == "it's a model"
    assert body["stream"] is True
    assert body["messages"][0]["content"] == "What is the capital of France?"
    assert "Authorization: Bearer KEY" not in words
    assert "Authorization: Bearer KEY" in shlex.split(curl_line("http://h", "m", needs_key=True))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["num_bloks=3"], "unknown key num_bloks; did you mean num_blocks"),
        (["--topology", "ring"], "topology = 'ring'"),
        (["dtype=float8"], "--dtype = 'float8'"),
        (["--config", "/no/such/file"], "cannot read /no/such/file"),
    ],
)
def test_up_refuses_with_2_and_the_reason(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["up", *arguments])
    assert result.exit_code == 2
    assert said in result.output
