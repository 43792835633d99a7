"""`galley key`: the key is shown once, and the line that it gives lets that key in."""

from pathlib import Path

from typer.testing import CliRunner

from cli.main import app
from services.gateway.http.keys import hash_line, read_keys


def test_a_new_key_and_its_line(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["key", "alice,\nsince May"])
    assert result.exit_code == 0
    key, line = result.stderr.strip(), result.stdout.strip()
    assert line == hash_line(key, "alice, since May")
    (tmp_path / "keys").write_text(result.stdout)
    assert read_keys(tmp_path / "keys").knows(key)


def test_a_key_that_exists_is_hashed_and_not_shown() -> None:
    result = CliRunner().invoke(app, ["key", "--hash-stdin"], input="sk-old\n")
    assert (result.exit_code, result.stdout.strip(), result.stderr) == (0, hash_line("sk-old"), "")
    assert CliRunner().invoke(app, ["key", "--hash-stdin"], input="\n").exit_code == 2
