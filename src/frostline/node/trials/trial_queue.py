"""Gives turns at trying engines to tenants, while other requests wait."""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

from frostline.node.scheduling.memory_pool import Cancelled

__all__ = ("TrialQueue",)


class TrialQueue:
    """Grants one turn at a time, to the tenant that had the least trial time so far. Safe for threads.

    Args:
        clock: returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._numbers = count()
        self._waiting: dict[int, str] = {}
        self._had_s: defaultdict[str, float] = defaultdict(float)
        self._is_taken = False

    @contextmanager
    def turn(self, tenant: str, is_abandoned: Callable[[], bool]) -> Iterator[None]:
        """Wait for a turn, which lasts as long as the context.

        Args:
            tenant: name of the tenant.
            is_abandoned: checked after every change and ``wake``; True cancels the wait.

        Raises:
            Cancelled: if the wait was cancelled.
        """
        self._take(tenant, is_abandoned)
        began_s = self._clock()
        try:
            yield
        finally:
            with self._changed:
                self._had_s[tenant] += self._clock() - began_s
                self._is_taken = False
                self._changed.notify_all()

    @property
    def waiting(self) -> int:
        """The number of waiting requests."""
        return len(self._waiting)

    def wake(self) -> None:
        """Make all waiting threads check whether they are still wanted."""
        with self._changed:
            self._changed.notify_all()

    def _take(self, tenant: str, is_abandoned: Callable[[], bool]) -> None:
        with self._changed:
            number = next(self._numbers)
            self._waiting[number] = tenant
            try:
                self._changed.wait_for(lambda: is_abandoned() or self._is_next(number))
                if is_abandoned():
                    raise Cancelled
                self._is_taken = True
            finally:
                del self._waiting[number]
                self._changed.notify_all()

    def _is_next(self, number: int) -> bool:
        return not self._is_taken and number == min(self._waiting, key=self._place)

    def _place(self, number: int) -> tuple[float, int]:
        return self._had_s[self._waiting[number]], number
