"""The command line: verbs; the only place that prints or exits."""

import os
import time
from collections.abc import Sequence
from pathlib import Path

from frostline.core.processes import have_arrow_do_without_pandas
from frostline.engines.machine import ENVIRONMENT, end_at_once, keep_freed_memory

__all__ = ("main", "process_began_at")

_STAT = Path("/proc/self/stat")
# Fields of proc_pid_stat(5) after the name in brackets, and the ticks in which they count (always 100 for programs).
_STARTED, _TICKS_A_SECOND = 19, 100


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a verb and exit: 0 done, 1 failed, 2 the user can put it right, 130 interrupted.

    Without arguments the process is the command's own: they are its own, and its seconds count from its start.
    """
    began_at = process_began_at() if arguments is None else time.perf_counter()
    # The process is Frostline's own, and keeps freed memory for the next batch (docs/decisions/0007). The verbs import
    # numpy and start its threads, after which it would be too late.
    keep_freed_memory()
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    end_at_once()
    have_arrow_do_without_pandas()
    from frostline.cli.commands import run

    run(arguments, began_at)


def process_began_at() -> float:
    """When this process started, as ``time.perf_counter`` counts; now, where the system does not say."""
    now = time.perf_counter()
    try:
        ticks = int(_STAT.read_text().rpartition(")")[2].split()[_STARTED])
        return now - max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / _TICKS_A_SECOND)
    except (OSError, ValueError, IndexError, AttributeError):
        return now
