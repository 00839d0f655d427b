"""The processes in which a node of this process tries engines."""

import os
import signal
from contextlib import contextmanager, suppress
from pathlib import Path

from support.nodes import stop, until


def trial_processes():
    """Their numbers."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            words = (folder / "cmdline").read_bytes().split(b"\0")
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            if b"frostline.node.trials.trial_process" in words and parent == str(os.getpid()):
                found.append(int(folder.name))
    return found


@contextmanager
def held_trial():
    """Stop the trial that begins next, so that it lasts until it is killed or the context ends; yields its number."""
    until(trial_processes)
    (pid,) = trial_processes()
    try:
        stop(pid)
        yield pid
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
