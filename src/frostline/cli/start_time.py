"""Knows when the command began: with its process, where the process is the command's own."""

import time
from pathlib import Path

__all__ = ("process_began_at",)

_STAT = Path("/proc/self/stat")
# Fields of proc_pid_stat(5) after the name in brackets, and the ticks in which they count (always 100 for programs).
_STARTED, _TICKS_A_SECOND = 19, 100


def process_began_at() -> float:
    """When this process started, as ``time.perf_counter`` counts; now, where the system does not say."""
    now = time.perf_counter()
    try:
        ticks = int(_STAT.read_text().rpartition(")")[2].split()[_STARTED])
        return now - max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / _TICKS_A_SECOND)
    except (OSError, ValueError, IndexError, AttributeError):
        return now
