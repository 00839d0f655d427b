"""The command line: verbs; the only place that prints or exits."""

import os
import time
from collections.abc import Sequence

from frostline.cli.start_time import process_began_at
from frostline.engines.machine.allocator import ENVIRONMENT, keep_freed_memory
from frostline.engines.machine.isolation import end_at_once

__all__ = ("main",)


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
    from frostline.cli.commands import run

    run(arguments, began_at)
