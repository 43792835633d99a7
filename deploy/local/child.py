"""Becomes a child that cannot outlive its launcher: `python child.py LAUNCHER_PID COMMAND...`.

Run as a file by a bare interpreter, so that it costs milliseconds; exec keeps the pid and the death signal.
Knows nothing of what it becomes.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def become(launcher: int, command: list[str]) -> None:
    """Have the kernel send SIGKILL when `launcher` dies; exec `command`. Returns if it is dead already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != launcher:  # it died before the kernel was asked
        return
    os.execvp(command[0], command)


if __name__ == "__main__":
    become(int(sys.argv[1]), sys.argv[2:])
