"""Decides how many bytes a window may hold: what the requests need, and what rides out the spread of their times."""

from frostline.core.units import in_bytes, in_percent, in_seconds
from frostline.tuning.periods import Period

__all__ = ("Depth",)

# Of the requests' own bytes: one is under way while its row is handed out and the next one is asked for.
_REQUESTS_TIMES = 2.0
# A late answer holds back what arrives after it: so much arrives in the time by which it is late.
_LATE_TIMES = 2.0
# The loop waited though the window was full: some of the time, at some of the looks.
_WAITS, _FULL = 0.03, 0.1
_MORE, _MAX = 2.0, 256.0
# What was too little is tried again after so long without waiting for it.
_PATIENCE_S = 30.0
# What is set is more than what is wanted, and stays while that is neither more nor so much less: changes are events.
_AMPLE, _MIN_USED = 1.5, 0.4


class Depth:
    """As deep as bandwidth times delay asks for, and deeper where a full window still lets the loop wait.

    Whether the model is right is not taken for granted: a loop that takes many batches at once, or a store with a
    heavier tail than the times show, empties a window that should do. Each time it does, the depth doubles, and half
    of that is given back after half a minute in which it did not.

    Args:
        most: bytes that it may choose.
        first: to begin with.
    """

    def __init__(self, most: int, *, first: int) -> None:
        self._most = most
        self._times = 1.0
        self._patient_until_s = 0.0
        self.nbytes = min(first, most)

    def judge(self, period: Period, requests: int, *, may_shrink: bool) -> str | None:
        """Take a period; why ``nbytes`` is another from now on, None where it stays.

        Args:
            period: under the bounds in force.
            requests: that are kept, or tried.
            may_shrink: nothing else is being tried.
        """
        if period.stalled >= _WAITS and period.full >= _FULL:
            return self._deepen(period, requests)
        if period.now_s >= self._patient_until_s and self._times > 1:
            self._times = max(1.0, self._times / _MORE)
            self._patient_until_s = period.now_s + _PATIENCE_S
        wanted = self._wanted(period, requests)
        is_less = wanted < _MIN_USED * self.nbytes
        if wanted <= self.nbytes and not (is_less and may_shrink):
            return None
        self.nbytes = min(self._most, int(_AMPLE * wanted))
        return f"{requests} requests of {in_bytes(period.request_bytes)}, {_spread(period)}"

    def _deepen(self, period: Period, requests: int) -> str | None:
        self._patient_until_s = period.now_s + _PATIENCE_S
        if self.nbytes >= self._most:
            return None
        wanted = max(self._wanted(period, requests), int(_MORE * self.nbytes))
        self._times = min(_MAX, self._times * max(1.0, wanted / self._wanted(period, requests)))
        self.nbytes = min(wanted, self._most)
        return f"the window was full, and the loop waited {in_percent(period.stalled)} of the time"

    def _wanted(self, period: Period, requests: int) -> int:
        late_s = max(0.0, period.late_s - period.median_s)
        nbytes = _REQUESTS_TIMES * requests * period.request_bytes + _LATE_TIMES * late_s * period.bytes_per_s
        return min(self._most, max(1, int(self._times * nbytes)))


def _spread(period: Period) -> str:
    return f"which take {in_seconds(period.median_s)}, one in twenty {in_seconds(period.late_s)}"
