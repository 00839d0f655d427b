"""Decides what the rate and the share of waiting were lately, from counts that only grow."""

from collections import deque

__all__ = ("RecentRates",)


class RecentRates:
    """Rates over the last seconds. Not for several threads.

    Args:
        seconds: how far back they reach.
    """

    def __init__(self, seconds: float = 10.0) -> None:
        self._seconds = seconds
        self._counts: deque[tuple[float, int, float]] = deque()

    def take(self, now_s: float, samples: int, stall_s: float) -> tuple[float, float]:
        """Take counts, and return samples a second and the share of the time that was waited, both 0 at first.

        Args:
            now_s: monotonic seconds.
            samples: samples taken so far.
            stall_s: seconds waited so far. A wait that is said at its end counts at its end.
        """
        counts = self._counts
        counts.append((now_s, samples, stall_s))
        while len(counts) > 2 and counts[1][0] <= now_s - self._seconds:
            counts.popleft()
        since_s, before, stalled_s = counts[0]
        if now_s <= since_s:
            return 0.0, 0.0
        passed_s = now_s - since_s
        return (samples - before) / passed_s, min(1.0, max(0.0, (stall_s - stalled_s) / passed_s))
