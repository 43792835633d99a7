"""Have a cluster's model on disk before several services want it at once.

Knows nothing of how a model is converted: that is a process of its own, which shows its progress.
"""

import asyncio
import sys
from pathlib import Path

from common import model_files
from common.config import ModelSettings
from common.errors import ConfigError
from deploy.local.processes import mortal


async def prepare_model(settings: ModelSettings) -> None:
    """Convert or download `settings.model` unless it is there. Raises ConfigError when that fails."""
    if _is_prepared(settings.model, settings.cache_path):
        return
    module = model_files.PREPARE_COMMAND.split()[-1]
    arguments = ["-m", module, "--model", settings.model, "--cache-dir", str(settings.cache_path)]
    process = await asyncio.create_subprocess_exec(*mortal([sys.executable, *arguments]))
    try:
        code = await process.wait()
    except asyncio.CancelledError:
        process.kill()
        await process.wait()
        raise
    if code:
        raise ConfigError(f"model {settings.model} could not be prepared (see above)", param="model")


def _is_prepared(model: str, cache_dir: Path) -> bool:
    if model == model_files.DEFAULT_MODEL:
        return (model_files.default_directory(cache_dir) / "config.json").is_file()
    return Path(model).expanduser().is_dir()
