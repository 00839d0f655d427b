"""Has Python's garbage collector rest while much is made that stays."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ("collector_rests",)


@contextmanager
def collector_rests() -> Iterator[None]:
    """Turn the collector off, and on again at the end where it was on.

    To import PyTorch and to trace a network makes millions of objects, nearly all of which stay. The collector would
    look through them again and again, for a fifth of the time to import PyTorch and two fifths of that to trace
    (``benchmarks/first_step.py``).
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
