"""Decides both bounds of a window by what the loop waits for, in either direction and for ever."""

from dataclasses import replace

from frostline.config import LoaderSettings
from frostline.core.units import in_bytes, in_percent, in_seconds
from frostline.tuning.parallelism import Move, Parallelism
from frostline.tuning.periods import NewBounds, Observation, Period, Periods, Setting, Steady, TuningRule
from frostline.tuning.prisma import Prisma

__all__ = ("AutoTuning", "Depth", "rule_of")

# Of the requests' own bytes: one is under way while its row is handed out and the next one is asked for.
_REQUESTS_TIMES = 2.0
# Chance makes one node's queue longer than another's. With one request for each an epoch over 8 nodes takes 8 % longer
# than their devices need, and with two less than 5 % (``tests/prefetch/test_owners_keep_nodes_busy.py``).
_REQUESTS_A_NODE = 4
# A late answer holds back what arrives after it: so much arrives in the time by which it is late.
_LATE_TIMES = 2.0
# The loop waited though the window was full: some of the time, at some of the looks.
_WAITS, _FULL = 0.03, 0.1
_MORE, _MAX = 2.0, 256.0
# What was too little is tried again after so long without waiting for it.
_PATIENCE_S = 30.0
# Half as many bytes again are set as are wanted. They change where the wanted ones exceed them or fall below 40 % of
# them, and not with every look, because each change is an event.
_AMPLE, _MIN_USED = 1.5, 0.4


class Depth:
    """As deep as bandwidth times delay asks for, and deeper where a full window still lets the loop wait.

    Whether the model is right is not taken for granted: a loop that takes many batches at once, or a store with a
    heavier tail than the times show, empties a window that should do. Each time it does, the depth doubles, and half
    of that is given back after half a minute in which it did not.

    Args:
        maximum: bytes that it may choose.
        first: to begin with.
    """

    def __init__(self, maximum: int, *, first: int) -> None:
        self._maximum = maximum
        self._times = 1.0
        self._patient_until_s = 0.0
        self.nbytes = min(first, maximum)

    def judge(self, period: Period, requests: int, *, may_shrink: bool) -> str | None:
        """Take a period; why ``nbytes`` is another from now on, None where it stays.

        Args:
            period: under the bounds in force.
            requests: number of requests that are kept, or tried.
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
        self.nbytes = min(self._maximum, int(_AMPLE * wanted))
        return f"{requests} requests of {in_bytes(period.request_bytes)}, {_spread(period)}"

    def _deepen(self, period: Period, requests: int) -> str | None:
        self._patient_until_s = period.now_s + _PATIENCE_S
        if self.nbytes >= self._maximum:
            return None
        wanted = max(self._wanted(period, requests), int(_MORE * self.nbytes))
        self._times = min(_MAX, self._times * max(1.0, wanted / self._wanted(period, requests)))
        self.nbytes = min(wanted, self._maximum)
        return f"the window was full, and the loop waited {in_percent(period.stalled)} of the time"

    def _wanted(self, period: Period, requests: int) -> int:
        late_s = max(0.0, period.late_s - period.median_s)
        nbytes = _REQUESTS_TIMES * requests * period.request_bytes + _LATE_TIMES * late_s * period.bytes_per_s
        return min(self._maximum, max(1, int(self._times * nbytes)))


def _spread(period: Period) -> str:
    return f"which take {in_seconds(period.median_s)}, one in twenty {in_seconds(period.late_s)}"


class AutoTuning:
    """Frostline's own rule: ``Parallelism`` for the requests, ``Depth`` for the bytes.

    Every change says why. It never stops for good, and never leaves ``maximum``.

    Args:
        maximum: bounds that it stays within.
        requests: to begin with.
        window_bytes: to begin with; None is all of ``maximum``, since nothing is known.
    """

    def __init__(self, maximum: Setting, *, requests: int, window_bytes: int | None = None) -> None:
        self._maximum = maximum
        self._parallelism = Parallelism(requests, maximum=maximum.requests)
        self._depth = Depth(maximum.window_bytes, first=maximum.window_bytes if window_bytes is None else window_bytes)
        self._periods = Periods(self._parallelism.requests)

    @property
    def setting(self) -> Setting:
        """The bounds in force."""
        return Setting(requests=self._parallelism.requests, window_bytes=self._depth.nbytes)

    def look(self, look: Observation) -> NewBounds | None:
        """See ``TuningRule``."""
        before = replace(self.setting, requests=self._parallelism.kept)
        if look.failures:
            return self._moved(self._parallelism.refused(look.requests_in_flight + look.failures, look.now_s), before)
        for seconds in look.took_s:
            self._parallelism.took(seconds, look.now_s)
        period = self._periods.add(look)
        if period is None:
            return None
        return self._moved(self._parallelism.judge(period, self._maximum.window_bytes), before, period)

    def _moved(self, move: Move | None, before: Setting, period: Period | None = None) -> NewBounds | None:
        reasons = [] if move is None else [move.reason]
        if period is not None:
            is_settled = move is None and self._parallelism.is_settled
            deeper = self._depth.judge(period, self._parallelism.requests, may_shrink=is_settled)
            reasons += [] if deeper is None else [deeper]
        if not reasons:
            return None
        self._periods.restart(self._parallelism.requests)
        is_trial = move is not None and move.is_trial
        if is_trial:  # what was tried before it may have been kept
            before = replace(before, requests=self._parallelism.kept)
        return NewBounds(before=before, after=self.setting, is_trial=is_trial, reason="; ".join(reasons))


def rule_of(settings: LoaderSettings, *, window_bytes: int | None = None, nodes: int = 1) -> TuningRule:
    """The rule for one job's windows.

    Args:
        settings: name it, and bound it.
        window_bytes: bytes that a followed window may hold before it is known to need more; None is all of it.
        nodes: nodes that own the samples; a followed window begins with a few requests for each.
    """
    maximum = Setting(requests=settings.last_requests, window_bytes=settings.window_bytes)
    if settings.is_followed:
        first = max(settings.first_requests, min(_REQUESTS_A_NODE * nodes, maximum.requests))
        return AutoTuning(maximum, requests=first, window_bytes=window_bytes)
    if settings.requests_in_flight is None and settings.tuning == "prisma":
        return Prisma(maximum, rows_per_request=settings.samples_per_request)
    return Steady(maximum)
