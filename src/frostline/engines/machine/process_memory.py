"""Reads what memory this process has, and the most that it had since it was told to look anew."""

import ctypes
import resource
import sys
from pathlib import Path

__all__ = ("can_measure", "give_back_freed", "limit_memory", "look_anew", "peak_bytes", "resident_bytes")

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
# proc(5): writing 5 sets the peak of resident memory to what is resident now.
_PEAK = "5"


def can_measure() -> bool:
    """Whether the system tells, and lets the peak be set back."""
    try:
        look_anew()
    except OSError:
        return False
    return _STATUS.exists()


def resident_bytes() -> int:
    """Memory of this process now."""
    return _field("VmRSS:")


def peak_bytes() -> int:
    """The most since the last ``look_anew``."""
    return _field("VmHWM:")


def look_anew() -> None:
    """Forget the peak so far."""
    _CLEAR.write_text(_PEAK)


def limit_memory(max_bytes: int) -> None:
    """Let this process take so many bytes more; what it asks for beyond is refused."""
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_DATA, (_field("VmData:") + max_bytes, resource.RLIM_INFINITY))


def give_back_freed() -> None:
    """Have the C library give back what was freed, so that what is taken next shows."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def _field(name: str) -> int:
    lines = _STATUS.read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))
