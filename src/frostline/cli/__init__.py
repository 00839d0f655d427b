"""The command line: verbs; the only place that prints or exits."""

import os
from collections.abc import Sequence

from frostline.engines.allocator import ENVIRONMENT, keep_freed_memory
from frostline.engines.ending import end_at_once

__all__ = ("main",)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a verb and exit: 0 done, 1 failed, 2 the user can put it right, 130 interrupted."""
    # The process is Frostline's own, and keeps freed memory for the next batch (docs/decisions/0007). The verbs import
    # numpy and start its threads, after which it would be too late.
    keep_freed_memory()
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    end_at_once()
    from frostline.cli.verbs import run

    run(arguments)
