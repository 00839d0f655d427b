"""Keeps tracing, trials and runs apart: within the process, and in processes whose memory and end are watched.

A network that runs in another thread meanwhile takes other kernels, and its features differ in the last bits.
So runs share the process among themselves, and a trace waits for them and has it alone. Two traces at a time fail, each
by what the other has changed.
"""

import atexit
import ctypes
import gc
import resource
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = (
    "can_measure",
    "computing",
    "end_at_once",
    "give_back_freed",
    "limit_memory",
    "look_anew",
    "peak_bytes",
    "resident_bytes",
    "resting",
    "tracing",
)

_CHANGED = threading.Condition()
_ONE_TRACES = threading.RLock()
_running = 0
_traces = 0


@contextmanager
def computing() -> Iterator[None]:
    """Run a network; waits while somebody traces. Not to be nested."""
    _enter()
    try:
        yield
    finally:
        _leave()


@contextmanager
def resting() -> Iterator[None]:
    """Within ``computing``, between two operations: let others trace, or run another network in this thread."""
    _leave()
    try:
        yield
    finally:
        _enter()


def _enter() -> None:
    global _running  # noqa: PLW0603 (the switch that this guards is the process's own)
    with _CHANGED:
        _CHANGED.wait_for(lambda: not _traces)
        _running += 1


def _leave() -> None:
    global _running  # noqa: PLW0603 (as above)
    with _CHANGED:
        _running -= 1
        _CHANGED.notify_all()


@contextmanager
def tracing() -> Iterator[None]:
    """Trace a network; waits for what runs and for other traces, and holds back runs that would begin."""
    global _traces  # noqa: PLW0603 (as above)
    with _CHANGED:
        _traces += 1
        try:
            _CHANGED.wait_for(lambda: not _running)
        except BaseException:
            _traces -= 1
            raise
    try:
        with _ONE_TRACES:
            yield
    finally:
        with _CHANGED:
            _traces -= 1
            _CHANGED.notify_all()


def end_at_once() -> None:
    """Have the interpreter not look through all that torch made once more as it ends, for most of a second."""
    atexit.register(gc.freeze)


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
