"""The virtual-time loop under the name that tests know it by; see bench/virtual/loop.py."""

from bench.virtual.loop import Deadlock, Overtime, VirtualLoop, run_virtual

__all__ = ["Deadlock", "Overtime", "VirtualLoop", "run_virtual"]
