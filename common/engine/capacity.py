"""How many KV blocks a worker may hold, from the memory that is there. Knows nothing of torch."""

from pathlib import Path
from typing import Final

from common.errors import ConfigError
from common.kv.layout import KVLayout

CPU_POOL_LIMIT: Final = 4 << 30
"""Bytes. Several workers share one machine's memory and each sees all of it as free."""


def num_blocks_for(
    layout: KVLayout,
    available: int,
    *,
    memory_fraction: float,
    max_num_seqs: int,
    max_model_len: int,
    limit: int,
) -> int:
    """Blocks of a pool by default: what fits, and no more than all sequences at full length could use.

    `available` and `limit` are bytes. Raises ConfigError when not even one sequence of one block fits.
    """
    useful = max_num_seqs * layout.blocks_for(max_model_len)
    fitting = min(int(available * memory_fraction), limit) // layout.block_bytes
    blocks = min(useful, fitting)
    if blocks < 2:
        raise ConfigError(f"num_blocks: {available >> 20} MiB of memory are too few for the KV cache")
    return blocks


def available_memory() -> int:
    """Bytes this process could still take: the machine's, or what its control group leaves it."""
    free = _meminfo_available(Path("/proc/meminfo"))
    group = Path("/sys/fs/cgroup")
    limit, used = _number(group / "memory.max"), _number(group / "memory.current")
    return free if limit is None or used is None else min(free, max(0, limit - used))


def _meminfo_available(path: Path) -> int:
    for line in path.read_text().splitlines():
        name, value, *_ = line.split()
        if name == "MemAvailable:":
            return int(value) * 1024
    raise ConfigError(f"num_blocks: {path} does not tell the free memory; set num_blocks")


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
