"""Becomes a child that cannot outlive its launcher: `python child.py LAUNCHER_PID COMMAND...`.

Run as a file by a bare interpreter, so that it costs milliseconds; exec keeps the pid and the death signal.
Knows nothing of what it becomes.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(number: signal.Signals) -> None:
    """Have the kernel send this process `number` when the thread that started it ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")


def become(launcher: int, command: list[str]) -> None:
    """Exec `command`, to be killed with `launcher`. Returns only if that is dead already."""
    die_with_parent(signal.SIGKILL)
    if os.getppid() == launcher:  # it may have died before the kernel was asked
        os.execvp(command[0], command)


if __name__ == "__main__":
    become(int(sys.argv[1]), sys.argv[2:])
