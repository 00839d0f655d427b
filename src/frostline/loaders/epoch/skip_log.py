"""What the processes of a job could not read: a file in memory to which each appends, and which all read."""

import json
import os
import tempfile
import weakref
from collections.abc import Callable
from dataclasses import asdict
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

from frostline.core import Skipped

__all__ = ("SkipLog",)


class SkipLog:
    """Samples that could not be read, by whichever of a job's processes. Safe for several threads and processes.

    Processes that are forked share it, and those that ``multiprocessing`` starts. One that it reaches otherwise, such
    as over a network, can be told nothing: a ``None`` comes out of the pickle there.

    Args:
        handle: a file descriptor of the log that another process has made; None makes a new one.

    Attributes:
        close: let it go, in this process. What is appended afterwards is lost, and nothing is read.
    """

    def __init__(self, handle: int | None = None) -> None:
        if handle is None:
            handle = _new()
        self._handle = handle
        self.close = weakref.finalize(self, os.close, handle)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        if get_spawning_popen() is None or not self.close.alive:
            return _nowhere, ()
        return _received, (DupFd(self._handle),)

    def append(self, skipped: Skipped) -> None:
        """Tell all processes."""
        if self.close.alive:
            os.write(self._handle, json.dumps(asdict(skipped)).encode() + b"\n")

    def read(self, since: int) -> tuple[list[Skipped], int]:
        """What was appended after the first ``since`` bytes, and where that ends: ``since`` of the next call."""
        if not self.close.alive or (size := os.fstat(self._handle).st_size) <= since:
            return [], since
        text = os.pread(self._handle, size - since, since)
        lines = text[: text.rfind(b"\n") + 1]  # a line may still be on its way
        return [Skipped(**json.loads(line)) for line in lines.splitlines()], since + len(lines)


def _new() -> int:
    """A file without a name, in memory where the system has such, to whose end all processes write."""
    if hasattr(os, "memfd_create"):
        import fcntl

        handle = os.memfd_create("frostline-skipped")
        fcntl.fcntl(handle, fcntl.F_SETFL, os.O_APPEND)  # so that lines of several processes do not overlap
        return handle
    with tempfile.TemporaryDirectory() as folder:  # which goes at once; the file stays as long as it is open
        return os.open(Path(folder, "skipped"), os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)


def _received(handle: Any) -> SkipLog:
    return SkipLog(handle.detach())


def _nowhere() -> None:
    return None
