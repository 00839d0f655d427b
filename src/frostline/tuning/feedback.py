"""Decides both bounds of a window by what the loop waits for, in either direction and for ever."""

from dataclasses import replace

from frostline.tuning.depth import Depth
from frostline.tuning.parallelism import Move, Parallelism
from frostline.tuning.periods import Period, Periods
from frostline.tuning.values import Look, NewBounds, Setting

__all__ = ("Following",)


class Following:
    """Frostline's own rule: ``Parallelism`` for the requests, ``Depth`` for the bytes.

    Every change says why. It never stops for good, and never leaves ``most``.

    Args:
        most: bounds that it stays within.
        requests: to begin with.
        window_bytes: to begin with; None is all of ``most``, since nothing is known.
    """

    def __init__(self, most: Setting, *, requests: int, window_bytes: int | None = None) -> None:
        self._most = most
        self._parallelism = Parallelism(requests, most=most.requests)
        self._depth = Depth(most.window_bytes, first=most.window_bytes if window_bytes is None else window_bytes)
        self._periods = Periods(self._parallelism.requests)

    @property
    def setting(self) -> Setting:
        """The bounds in force."""
        return Setting(requests=self._parallelism.requests, window_bytes=self._depth.nbytes)

    def look(self, look: Look) -> NewBounds | None:
        """See ``Rule``."""
        before = replace(self.setting, requests=self._parallelism.kept)
        if look.failures:
            return self._moved(self._parallelism.refused(look.requests_in_flight + look.failures, look.now_s), before)
        for seconds in look.took_s:
            self._parallelism.took(seconds, look.now_s)
        period = self._periods.add(look)
        if period is None:
            return None
        return self._moved(self._parallelism.judge(period, self._most.window_bytes), before, period)

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
