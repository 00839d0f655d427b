"""Knows whether the latest pass over a loader is another process's, which this one does not see."""

import mmap
import os
from multiprocessing.context import get_spawning_popen

__all__ = ("Elsewhere",)


class Elsewhere:
    """Told of each pass, in whichever process it begins. For one thread at a time."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._renew()

    def __bool__(self) -> bool:
        """The latest pass is that of a process which this one forked, or had multiprocessing start."""
        return self._process == os.getpid() and self._mark[0] != 0

    def begin(self) -> None:
        """A pass begins in the process that calls this, or it was said there where the next one does."""
        if self._process == os.getpid():
            self._renew()
        else:
            self._mark[0] = 1

    def travels(self) -> None:
        """The loader is being pickled: to a process that makes passes of it, where multiprocessing starts one."""
        if get_spawning_popen() is not None:
            self._mark[0] = 1

    def _renew(self) -> None:
        # Forked processes share these pages with the one that made them. Those of an older pass, which may still run,
        # have the mark of that one.
        self._mark = mmap.mmap(-1, 1)
