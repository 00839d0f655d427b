"""Knows which reads of a store are stragglers, so that those which somebody waits for are made a second time."""

import threading
import time
from collections.abc import Callable

from frostline.core.hedging import HedgeTimer

__all__ = ("HedgedReads",)

# Until so many reads have ended that one can be late, and while enough were made twice, this is looked at again.
_LOOK_AGAIN_S = 1.0


class HedgedReads:
    """How long the reads of one store take. Safe for threads.

    A read is compared with those before it that were as large, by powers of two. The few that are larger than nearly
    all are not made twice: nothing is known of such reads.

    Args:
        quantile: see ``HedgeTimer``.
        now: monotonic seconds.

    Attributes:
        now: monotonic seconds.
    """

    def __init__(self, quantile: float, now: Callable[[], float] = time.monotonic) -> None:
        self.now = now
        self._hedge_timer = HedgeTimer(quantile)
        self._lock = threading.Lock()

    def took(self, nbytes: int, begun_at: float) -> None:
        """A read that began then has ended well."""
        with self._lock:
            self._hedge_timer.took(None, nbytes.bit_length(), self.now() - begun_at)

    def wait_s(self, nbytes: int, begun_at: float | None) -> float:
        """How long to wait for a read before asking ``is_late``; it began then, or not yet."""
        with self._lock:
            late_after_s = self._hedge_timer.late_after_s(None, nbytes.bit_length())
        if late_after_s is None:
            return _LOOK_AGAIN_S
        return late_after_s if begun_at is None else max(0.0, begun_at + late_after_s - self.now())

    def is_late(self, nbytes: int, begun_at: float) -> bool:
        """Whether to make the read a second time: then that is counted as done."""
        with self._lock:
            late_after_s = self._hedge_timer.late_after_s(None, nbytes.bit_length())
            is_late = late_after_s is not None and self.now() - begun_at >= late_after_s
            if is_late:
                self._hedge_timer.hedged(None)
        return is_late
