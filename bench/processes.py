"""What processes of this machine use: their CPU time, memory and cores, read from /proc."""

import os
from collections.abc import Iterable
from pathlib import Path

_TICK = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """User and system time of all threads since the process began."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICK


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def pin(pid: int, cores: Iterable[int]) -> None:
    """Keep all threads of the process, and those to come, on `cores`."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(thread.name), cores)


def busy_and_stolen_seconds(cores: Iterable[int]) -> tuple[float, float]:
    """Time since the machine's start in which `cores` worked, and in which their host gave them to others."""
    wanted = {f"cpu{core}" for core in cores}
    busy = stolen = 0
    for line in Path("/proc/stat").read_text().splitlines():
        name, *fields = line.split()
        if name in wanted:
            user, nice, system, _idle, _waiting, interrupts, soft, steal = map(int, fields[:8])
            busy += user + nice + system + interrupts + soft
            stolen += steal
    return busy / _TICK, stolen / _TICK
