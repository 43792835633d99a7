"""Our CPU operators for tests: from the cache directory that all runs share, so that they are seldom built.

Knows nothing of what is tested with them.
"""

from pathlib import Path
from typing import Final

import pytest

from common.engine import kernels
from common.model_files import DEFAULT_CACHE_DIR

CAPABLE: Final = not kernels.lacking_features()
"""Whether this CPU can have them at all."""


def load() -> None:
    """Load them where the CPU can; elsewhere see that the refusal says what is lacking."""
    if CAPABLE:
        kernels.load_kernels(DEFAULT_CACHE_DIR)
        return
    with pytest.raises(kernels.KernelsUnavailable, match="the CPU has no"):
        kernels.load_kernels(DEFAULT_CACHE_DIR)


def cache_with_kernels(directory: Path) -> Path:
    """`directory` as a cache with no graphs in it, whose operators are those of all runs."""
    built = DEFAULT_CACHE_DIR.expanduser() / "kernels"
    built.mkdir(parents=True, exist_ok=True)
    (directory / "kernels").symlink_to(built)
    return directory
