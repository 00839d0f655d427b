"""Shared memory without a name: written once, sealed, and gone when the last process that has it is."""

import fcntl
import os
from collections.abc import Sequence

from frostline.errors import Overloaded

__all__ = ("shared",)

_MAX_PARTS = 512  # of one call; Linux takes 1,024
# Whoever gets the descriptor can rely on it that nobody writes to the memory or cuts it short under its feet.
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


def shared(parts: Sequence[memoryview]) -> int:
    """A descriptor of memory that holds these parts one after the other and never changes; the caller closes it.

    Raises:
        Overloaded: The system gives none.
    """
    try:
        return _written(parts)
    except OSError as error:
        raise Overloaded(f"the I/O service gets no shared memory: {error.strerror}", retry_after_s=1.0) from error


def _written(parts: Sequence[memoryview]) -> int:
    # It is written by calls and never mapped here: filling a mapping takes a page fault for each page.
    descriptor = os.memfd_create("frostline", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        left = list(parts)
        while left:
            left = _without(left, os.writev(descriptor, left[:_MAX_PARTS]))
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _without(parts: Sequence[memoryview], nbytes: int) -> list[memoryview]:
    """What is left of parts after so many bytes."""
    for place, part in enumerate(parts):
        if nbytes < part.nbytes:
            return [part[nbytes:], *parts[place + 1 :]]
        nbytes -= part.nbytes
    return []
