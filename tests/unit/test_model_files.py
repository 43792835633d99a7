"""Finding models and reading their JSON."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from common import model_files
from common.engine import prepare_model
from common.errors import ConfigError, UnsupportedModel
from tests.support.tiny_models import make_tiny_model


def write(directory: Path, name: str = "config.json", **content: Any) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / name).write_text(json.dumps(content))
    return directory


def test_torch_is_not_needed() -> None:
    script = (
        "import sys, common.model_files; sys.exit(bool({'torch', 'ucxx', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_default_model_says_how_to_prepare_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="prepare_model"):
        model_files.resolve("default", tmp_path)
    directory = model_files.default_directory(tmp_path)
    directory.mkdir(parents=True)
    write(directory)
    assert model_files.resolve("default", tmp_path) == directory


def test_directories(tmp_path: Path) -> None:
    assert model_files.resolve(str(write(tmp_path / "Some-Model")), tmp_path) == tmp_path / "Some-Model"
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"no config\.json"):
        model_files.resolve(str(tmp_path / "empty"), tmp_path)
    with pytest.raises(ConfigError, match="no directory"):
        model_files.resolve(str(tmp_path / "missing"), tmp_path)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("default", "SmolLM2-135M-Instruct"),
        ("/models/Qwen3-0.6B/", "Qwen3-0.6B"),
        ("Qwen/Qwen3-0.6B", "Qwen3-0.6B"),
    ],
)
def test_served_name_is_the_last_path_part(model: str, name: str) -> None:
    assert model_files.served_name(model) == name


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({"max_position_embeddings": 8192}, 8192),
        ({"n_positions": 1024}, 1024),
        ({"text_config": {"max_position_embeddings": 77}}, 77),
        (
            {
                "max_position_embeddings": 131072,
                "original_max_position_embeddings": 4096,
                "rope_scaling": {"type": "longrope"},
            },
            4096,
        ),
        (
            {
                "max_position_embeddings": 131072,
                "rope_parameters": {"rope_type": "llama3", "original_max_position_embeddings": 8192},
            },
            131072,
        ),
    ],
)
def test_max_model_len(config: dict[str, Any], length: int, tmp_path: Path) -> None:
    assert model_files.max_model_len(write(tmp_path, **config)) == length


def test_no_length_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_model_len"):
        model_files.max_model_len(write(tmp_path))


def test_eos_of_the_generation_config_comes_first(tmp_path: Path) -> None:
    assert model_files.eos_token_ids(write(tmp_path)) == ()
    assert model_files.eos_token_ids(write(tmp_path, eos_token_id=2)) == (2,)
    write(tmp_path, "generation_config.json", eos_token_id=[5, 7])
    assert model_files.eos_token_ids(tmp_path) == (5, 7)
    write(tmp_path, "generation_config.json", top_p=0.9)
    assert model_files.eos_token_ids(tmp_path) == (2,)


def test_fingerprint_names_the_weights(tmp_path: Path) -> None:
    one = model_files.weights_fingerprint(make_tiny_model("llama", tmp_path / "a", seed=1))
    assert model_files.weights_fingerprint(make_tiny_model("llama", tmp_path / "b", seed=1)) == one
    assert model_files.weights_fingerprint(make_tiny_model("llama", tmp_path / "c", seed=2)) != one
    longer = make_tiny_model("llama", tmp_path / "d", seed=1, max_position_embeddings=2048)
    assert model_files.weights_fingerprint(longer) != one


def test_fingerprint_sees_one_changed_tensor(tmp_path: Path) -> None:
    directory = make_tiny_model("llama", tmp_path)
    before = model_files.weights_fingerprint(directory)
    path = directory / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert model_files.weights_fingerprint(directory) != before


def test_weights_must_be_safetensors(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="safetensors"):
        model_files.weights_fingerprint(write(tmp_path))


# --- preparing the default model -------------------------------------------------------------------


def test_prepare_converts_once_and_leaves_nothing_half_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Path] = []

    def convert(source: Path, target: Path, progress: prepare_model.Progress) -> None:
        calls.append(target)
        if len(calls) == 1:
            (target / "config.json").write_text("{}")
            raise ConfigError("disk full")
        (target / "config.json").write_text("{}")

    monkeypatch.setattr(prepare_model, "gguf_path", lambda: tmp_path / "model.gguf")
    monkeypatch.setattr(prepare_model, "_convert", convert)
    with pytest.raises(ConfigError, match="disk full"):
        prepare_model.prepare("default", tmp_path, lambda _line: None)
    with pytest.raises(ConfigError, match="not prepared"):
        model_files.resolve("default", tmp_path)
    lines: list[str] = []
    directory = prepare_model.prepare("default", tmp_path, lines.append)
    assert (
        directory
        == model_files.resolve("default", tmp_path)
        == prepare_model.prepare("default", tmp_path, print)
    )
    assert len(calls) == 2
    assert [path.name for path in directory.parent.iterdir() if path.is_dir()] == [directory.name]
    assert any("ready" in line for line in lines)
