"""Has a process of Frostline's own end at once, whatever torch made in it."""

import atexit
import gc

__all__ = ("end_at_once",)


def end_at_once() -> None:
    """Have the interpreter not look through all that torch made once more as it ends, for most of a second."""
    atexit.register(gc.freeze)
