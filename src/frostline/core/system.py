"""What this process is and uses: the version, its cores and memory, quiet threads, and fast checksums.

The checksum of bytes that are kept: CRC-32, the same as zlib's, by instructions of vectors.
"""

import ctypes
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from zlib_ng.zlib_ng import crc32

__all__ = (
    "STARTED",
    "__version__",
    "background",
    "collector_rests",
    "connection_slots",
    "cores_busy_s",
    "crc32",
    "give_back_freed",
    "imports_stay",
    "in_background",
    "is_stopped",
    "max_open_files",
    "threads_waited_s",
    "usable_cores",
    "usable_memory_bytes",
)


STARTED = {
    "decoding": "frostline.datasets.formats.cells_apart",
    "inspection": "frostline.node.inspection_process",
    "I/O service": "frostline.io_service",
    "listing": "frostline.datasets.listing_process",
    "node": "frostline.control",  # a node with all that is served beside it
    "Ray": "frostline.ray",
    "training": "frostline.training.in_store_process",
    "trial": "frostline.node.trials.trial_process",
}
"""Modules that are started by their names, as processes of their own, by modules that may not import them."""

_LIMITS = ("memory.max", "memory.limit_in_bytes")
"""What control groups of version 2 and of version 1 call the limit of a group."""


def usable_cores() -> tuple[int, ...]:
    """Numbers of the cores that this process may use: fewer than the machine has where it is pinned to some.

    Where the system pins no processes, as macOS, these are all of the machine's.
    """
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def cores_busy_s() -> tuple[float, float]:
    """Seconds in which the cores of this process worked for anybody, and all their seconds, each the sum over cores.

    Only differences between two readings mean anything. Where the system does not say, both are 0.
    """
    names = {f"cpu{core}" for core in usable_cores()}
    idle = total = 0
    for line in _lines(Path("/proc/stat")):
        name, *ticks = line.split()
        if name in names:
            # user, nice, system, idle, iowait, irq, softirq, steal (proc(5)); guests' are within the first two.
            idle += int(ticks[3]) + int(ticks[4])
            total += sum(map(int, ticks[:8]))
    per_s = os.sysconf("SC_CLK_TCK")
    return (total - idle) / per_s, total / per_s


def threads_waited_s(root: Path = Path("/")) -> dict[int, float]:
    """Seconds in which each thread of this process could have run, and no core was free; by its number.

    Nothing where the system does not count that, as only Linux does.

    Args:
        root: folder in which ``proc`` lies.
    """
    waited_s = {}
    for path in (root / "proc/self/task").glob("*/schedstat"):
        # Nanoseconds on a core, nanoseconds of waiting for one, and turns (Documentation/scheduler/sched-stats.rst).
        for line in _lines(path):
            waited_s[int(path.parent.name)] = int(line.split()[1]) / 1e9
    return waited_s


def is_stopped(pid: int) -> bool:
    """Whether somebody has stopped a process by a signal, to go on when they like; False where it has ended."""
    return any(line.rpartition(")")[2].split()[0] in "Tt" for line in _lines(Path(f"/proc/{pid}/stat")))


def usable_memory_bytes(root: Path = Path("/")) -> int:
    """Memory of the machine, or the least limit of the control groups around this process where that is less.

    Args:
        root: folder in which ``proc`` and ``sys`` lie.
    """
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([machine, *_limits(root)])


def _limits(root: Path) -> list[int]:
    """Limits of the process's control groups and of all above them; a container sees its own as the outermost one."""
    found = []
    for group in _lines(root / "proc/self/cgroup"):
        _, kinds, path = group.split(":", 2)
        if kinds and "memory" not in kinds.split(","):
            continue
        mounted = root / "sys/fs/cgroup" / ("memory" if kinds else "")
        inside = PurePosixPath(path.lstrip("/"))
        for folder in (inside, *inside.parents):
            limits = (line for name in _LIMITS for line in _lines(mounted / folder / name))
            found += [int(limit) for limit in limits if limit.isdigit()]
    return found


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().split("\n")[:-1]
    except OSError:  # no such system, no such group, or none that may be read
        return []


def max_open_files() -> int:
    """Files and sockets that this process may have open; -1 where nobody counts them."""
    try:
        import resource
    except ImportError:  # it is Unix's
        return -1
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return -1 if soft == resource.RLIM_INFINITY else soft


# File descriptors left for files, stores and caches, if there are at least twice as many.
_LEFT_FILES = 256


def connection_slots(maximum: int, open_files: int) -> int:
    """The number of connections, at least two, that a server may hold and still open what it serves.

    Args:
        maximum: number that it would hold at most.
        open_files: files and sockets that it may have open; a negative number means no limit.
    """
    if open_files < 0:
        return maximum
    return max(2, min(maximum, open_files - min(_LEFT_FILES, open_files // 2)))


def in_background() -> bool:
    """Have the calling thread, and whichever it starts, interrupt no other when it wakes.

    Linux's ``SCHED_BATCH`` (sched(7)): its share of the processors stays the same, but it waits until another thread's
    slice of some milliseconds ends. An answer comes in dozens of pieces, and each would wake a thread or two, which
    find a few kilobytes and cost whoever decodes two changes of threads and a part of the processor's caches; a slice
    later they find many pieces.

    Returns:
        True if the policy was changed; False if the system lacks it or does not let it be set, or the thread has a
        policy of its own.
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


@contextmanager
def collector_rests() -> Iterator[None]:
    """Turn the collector off, and on again at the end where it was on.

    To import PyTorch and to trace a network makes millions of objects, nearly all of which stay. The collector would
    look through them again and again, for a fifth of the time to import PyTorch and two fifths of that to trace
    (``benchmarks/first_step.py`` at commit 84d6b10c).
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def imports_stay() -> Iterator[None]:
    """The same, in a process of Frostline's own: what was imported stays, and is not looked through again.

    What PyTorch brings takes a tenth of a second each time, also long after (``gc.freeze``).
    """
    with collector_rests():
        yield
    gc.freeze()


__version__ = "0.1.0"


def give_back_freed() -> None:
    """Have the C library give back what was freed, which it keeps else, in parts of its heap that have holes."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
