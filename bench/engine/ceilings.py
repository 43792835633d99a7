"""What memory and matrix units give on the cores of this process, as torch reaches it.

Knows nothing of models.
"""

import time
from collections.abc import Callable

import torch

from bench.engine.cells import Ceilings

BUFFER_BYTES = 1 << 30
"""Far more than any cache holds."""
SIDE = 2048
READS = 2
PRODUCTS = 4


class CeilingProbe:
    """Two buffers of 1 GiB and two square matrices, kept for the whole run.

    With one core everything is one thread. With several, reading is tried with one thread and with all of
    them, as one thread of a fast machine does not fill its memory bus.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._buffers = tuple(torch.ones(BUFFER_BYTES // 4) for _ in range(2))
        self._matrices = tuple(torch.randn(SIDE, SIDE).bfloat16() for _ in range(2))

    def measure(self) -> Ceilings:
        """The best of a few tries of everything; takes about half a second."""
        try:
            counts = sorted({1, self._threads})
            read = max(self._read(count) for count in counts)
        finally:
            torch.set_num_threads(self._threads)
        left, right = self._matrices
        return Ceilings(read, 2 * SIDE**3 / _best(lambda: torch.mm(left, right), PRODUCTS))

    def _read(self, threads: int) -> float:
        """Bytes/s: the better of a sum, one buffer after the other, and a product of both."""
        torch.set_num_threads(threads)
        first, second = self._buffers
        sums = _best(lambda: (first.sum(), second.sum()), READS)
        dot = _best(lambda: torch.dot(first, second), READS)
        return 2 * BUFFER_BYTES / min(sums, dot)


def _best(work: Callable[[], object], tries: int) -> float:
    """Seconds of the fastest of `tries`."""
    times = []
    for _ in range(tries):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return min(times)
