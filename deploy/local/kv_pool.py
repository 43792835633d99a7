"""The KV pool that a local cluster gets when it needs one and nobody named one: a directory in main memory.

It is the cluster's own, and goes with it. Knows nothing of what is in it.
"""

import hashlib
import shutil
from pathlib import Path

MEMORY = Path("/dev/shm")


class OwnPool:
    """Of the cluster that has claimed `run_dir`; what a killed one left there is removed first."""

    def __init__(self, cluster: str, run_dir: Path) -> None:
        mark = hashlib.blake2b(str(run_dir.resolve()).encode(), digest_size=4).hexdigest()
        self._path = MEMORY / f"galley-{cluster}-{mark}"
        self.remove()

    @property
    def url(self) -> str:
        return f"file://{self._path}"

    def remove(self) -> None:
        shutil.rmtree(self._path, ignore_errors=True)
