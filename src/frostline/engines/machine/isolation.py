"""Keeps tracing and computing apart: torch.export switches oneDNN off for the whole process while it works.

A network that runs in another thread meanwhile takes other kernels, and its features differ in the last bits.
So runs share the process among themselves, and a trace waits for them and has it alone. Two traces at a time fail, each
by what the other has changed.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ("computing", "resting", "tracing")

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
