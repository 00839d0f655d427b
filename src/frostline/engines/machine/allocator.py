"""Has the C library keep freed memory for the next batch, instead of giving it back and faulting it in again."""

import ctypes
import os
import sys
import threading

__all__ = ("ENVIRONMENT", "keep_freed_memory", "keeps_freed_memory")

# mallopt(3) of glibc; the numbers are part of its binary interface (malloc.h).
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_M_ARENA_MAX = -8
_NEVER = (1 << 31) - 1

ENVIRONMENT = {
    # Threads that compute must not spin while others decode; OpenMP reads it once, when torch is imported.
    "OMP_WAIT_POLICY": "PASSIVE",
    # As keep_freed_memory, in the words of glibc's manual (mallopt(3), "Environment variables").
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(_NEVER),
}
"""For a process of Frostline's own that runs networks: what it must know before its first thread."""

_kept = threading.Event()


def keep_freed_memory() -> bool:
    """Let this process keep what it frees; for a process that is a node and nothing else.

    Eager networks free and ask for the same tens of megabytes at every layer. glibc maps each such block anew, and
    on a virtual machine the page faults take longer than the layers: EfficientNet-lite0 at batch 32 ran at 13
    images/s without this and at 46 with it (see ``benchmarks/results``). One arena, since only the main one can
    hold large blocks: call this before numpy or torch is imported, whose threads make arenas of their own, which
    later threads then share. A child process is better told by ``ENVIRONMENT``.

    Returns:
        Whether the C library took it: False beside glibc, where nothing changes.
    """
    if sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    wanted = ((_M_ARENA_MAX, 1), (_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, _NEVER))
    taken = [mallopt(name, value) for name, value in wanted]
    if all(taken):
        _kept.set()
    return all(taken)


def keeps_freed_memory() -> bool:
    """Whether this process does: it was made to, or told so when it was started."""
    told = os.environ.get("MALLOC_MMAP_MAX_") == ENVIRONMENT["MALLOC_MMAP_MAX_"]
    return _kept.is_set() or (told and sys.platform == "linux")
