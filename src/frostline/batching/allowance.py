"""Decides when a tenant that may use so many device seconds a second may begin more work."""

__all__ = ("Allowance",)

# Seconds' worth of it that may be used at once after a pause, so that a request need not be cut up.
_SAVED_S = 10.0


class Allowance:
    """A bucket of device seconds that fills at a rate. Not for several threads.

    Work is paid when it has run, since nobody knows before what it takes; what is owed must be saved up again before
    more begins. So in the long run no more than the rate is used, and beyond it only what was let in at once.

    Args:
        per_s: device seconds a second.
        saved_s: seconds' worth of it that may be used at once after a pause.
    """

    def __init__(self, per_s: float, saved_s: float = _SAVED_S) -> None:
        assert per_s > 0, "an allowance is above 0"
        self._per_s = per_s
        self._most = saved_s * per_s
        self._left = self._most
        self._at_s = 0.0
        self._owed = 0.0

    def spend(self, device_s: float, now_s: float) -> None:
        """So much was used, which counts twice while some is owed."""
        self._fill(now_s)
        paid_s = min(self._owed, device_s)
        self._owed -= paid_s
        self._left -= device_s + paid_s

    def owe(self, device_s: float) -> None:
        """So much was used that is to be paid by instalments: minutes at once would shut its tenant out for long."""
        self._owed += device_s

    def wait_s(self, now_s: float) -> float:
        """Seconds until more may begin; 0 where it may now."""
        self._fill(now_s)
        return max(0.0, -self._left / self._per_s)

    def _fill(self, now_s: float) -> None:
        passed_s, self._at_s = now_s - self._at_s, now_s
        self._left = min(self._most, self._left + self._per_s * max(0.0, passed_s))
