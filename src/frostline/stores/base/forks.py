"""Drivers whose threads do not survive a fork: knows which process uses one, and refuses those forked from it."""

import os
import threading
from collections.abc import Callable

from frostline.errors import StoreError

__all__ = ("Driver",)


class Driver:
    """A library that reaches stores with threads of its own. Safe for threads.

    Args:
        start: starts the threads; called once, by the first process that uses it.
    """

    def __init__(self, start: Callable[[], None]) -> None:
        self._start = start
        self._lock = threading.Lock()
        self._process: int | None = None
        self._has_started = False

    @property
    def is_used(self) -> bool:
        """Whether this process has used it, or one that it was forked from."""
        return self._process is not None

    def use(self, url: str) -> None:
        """It is about to be used.

        Args:
            url: URL of the store.

        Raises:
            StoreError: this process was forked from one that has used it.
        """
        if self._process is None:
            self._process = os.getpid()
        if self._process != os.getpid():
            raise StoreError(
                f"{url} cannot be read here: this process was forked from one that had used such a store. Start it "
                "with 'spawn' or 'forkserver', or have a service read for both: start frostline io --data-root "
                f"{url}, and give its address as near="
            )
        if not self._has_started:  # a forked process never comes here, so that it finds no lock which nobody opens
            with self._lock:
                if not self._has_started:
                    self._start()
                    self._has_started = True
