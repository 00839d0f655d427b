"""Says which processor cores and how much memory this process may use, on every system."""

import os
from pathlib import Path, PurePosixPath

__all__ = ("usable_cores", "usable_memory_bytes")

_LIMITS = ("memory.max", "memory.limit_in_bytes")
"""What control groups of version 2 and of version 1 call the limit of a group."""


def usable_cores() -> tuple[int, ...]:
    """Numbers of the cores that this process may use: fewer than the machine has where it is pinned to some.

    Where the system pins no processes, as macOS, these are all of the machine's.
    """
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


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
