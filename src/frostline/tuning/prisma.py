"""Decides by PRISMA's rule for producers and buffer, to compare with: it grows, and then it stops for ever."""

import statistics

from frostline.core.units import in_bytes
from frostline.tuning.periods import NewBounds, Observation, Setting

__all__ = ("Prisma",)

_INTERVAL_S = 0.1
_MIN_SAMPLES = 10
_FULL_PERCENT, _STEADY_PERCENT, _EMPTY_PERCENT = 80, 20, 30
_FIRST_SLOTS, _MORE_SLOTS = 10, 10


class Prisma:
    """PRISMA's auto-tuner, as its published implementation has it.

    Source: "The Case for Storage Optimization Decoupling in Deep Learning Frameworks", CLUSTER 2021. Every 100 ms, once
    ten samples of the buffer's occupancy were taken, in whole percent: where their mean is at least 80 and their
    standard deviation at most 20, it stops for ever. Else, where the mean is at most 30 or the deviation at most 20,
    there is one more producer. Else the buffer gets ten more slots. It begins with one producer and ten slots, and
    never takes anything back.

    A producer is a request under way here, and a slot holds one sample. Since what is under way counts as bytes of
    the window too, the window has room for the slots and for one request of each producer.

    Args:
        maximum: bounds that it stays within; the published defaults are the processor's threads and 60 slots.
        rows_per_request: samples in one request.
    """

    def __init__(self, maximum: Setting, *, rows_per_request: int) -> None:
        self._maximum = maximum
        self._rows = rows_per_request
        self._producers = 1
        self._slots = _FIRST_SLOTS
        self._request_bytes = 0
        self._occupancies: list[int] = []
        self._next_s: float | None = None
        self._has_stopped = False

    @property
    def setting(self) -> Setting:
        """The bounds in force; the most bytes until a request's are known."""
        nbytes = self._slot_bytes + self._producers * self._request_bytes if self._request_bytes else 1 << 62
        return Setting(requests=self._producers, window_bytes=min(max(1, nbytes), self._maximum.window_bytes))

    def look(self, look: Observation) -> NewBounds | None:
        """See ``TuningRule``."""
        if self._has_stopped:
            return None
        if not self._request_bytes:
            return self._sized(look)
        self._occupancies.append(int(100 * min(1.0, look.ready_bytes / max(1, self._slot_bytes))))
        self._next_s = look.now_s + _INTERVAL_S if self._next_s is None else self._next_s
        if look.now_s < self._next_s or len(self._occupancies) < _MIN_SAMPLES:
            return None
        self._next_s = look.now_s + _INTERVAL_S
        return self._judge()

    @property
    def _slot_bytes(self) -> int:
        return self._slots * self._request_bytes // self._rows

    def _sized(self, look: Observation) -> NewBounds | None:
        """The first look at a request says how large samples are."""
        if not look.requests_in_flight or not look.expected_bytes:
            return None
        before = self.setting
        self._request_bytes = max(self._rows, look.expected_bytes // look.requests_in_flight)
        return NewBounds(before=before, after=self.setting, reason=f"a request has {in_bytes(self._request_bytes)}")

    def _judge(self) -> NewBounds | None:
        mean = int(statistics.fmean(self._occupancies))
        deviation = int(statistics.pstdev(self._occupancies))
        self._occupancies.clear()
        before = self.setting
        if mean >= _FULL_PERCENT and deviation <= _STEADY_PERCENT:
            self._has_stopped = True
        elif mean <= _EMPTY_PERCENT or deviation <= _STEADY_PERCENT:
            self._producers = min(self._producers + 1, self._maximum.requests)
        elif self._slot_bytes < self._maximum.window_bytes:
            self._slots += _MORE_SLOTS
        if self.setting == before:
            return None
        return NewBounds(
            before=before, after=self.setting, reason=f"the buffer is {mean} % full, deviation {deviation} %"
        )
