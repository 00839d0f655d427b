"""Lets any thread give up what another one waits for."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from frostline.errors import Unavailable

__all__ = ("Cancellation",)


class Cancellation:
    """A call that may be given up. Safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_cancelled = False
        self._ends: list[Callable[[], None]] = []

    def cancel(self) -> None:
        """Nobody wants the result any more. Calling it again does nothing."""
        with self._lock:
            self._is_cancelled = True
            ends, self._ends = self._ends, []
            for end in ends:
                end()

    def check(self) -> None:
        """Go on only where somebody wants the result.

        Raises:
            Unavailable: Nobody does.
        """
        if self._is_cancelled:
            raise Unavailable("the request was given up")

    @contextmanager
    def ends(self, end: Callable[[], None]) -> Iterator[None]:
        """Work that ``end`` breaks off from any thread, soon and without waiting for it.

        Raises:
            Unavailable: It was given up before it began.
        """
        with self._lock:
            self.check()
            self._ends.append(end)
        try:
            yield
        finally:
            with self._lock:
                if end in self._ends:
                    self._ends.remove(end)
