"""Keeps threads that wait for stores and links from interrupting those that compute."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ("background", "in_background")


def in_background() -> bool:
    """From now on the calling thread, and whichever it starts, interrupts no other when it wakes.

    Linux's ``SCHED_BATCH`` (sched(7)): its share of the processors stays the same, but it waits until another thread's
    slice of some milliseconds ends. An answer comes in dozens of pieces, and each would wake a thread or two, which
    find a few kilobytes and cost whoever decodes two changes of threads and a part of the processor's caches; a slice
    later they find many pieces.

    Returns:
        Whether this changed it: not where there is no such policy, where none may be set, or where the thread has
        another than the usual one.
    """
    if not hasattr(os, "SCHED_BATCH"):
        return False
    try:
        is_usual = os.sched_getscheduler(0) == os.SCHED_OTHER
        if is_usual:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    except OSError:  # a sandbox forbids it
        return False
    return is_usual


@contextmanager
def background() -> Iterator[None]:
    """The same within the block: for a library that starts its threads there."""
    is_changed = in_background()
    try:
        yield
    finally:
        if is_changed:
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
