"""Decides when a request is so late that a second one for the same is worth its cost."""

import math
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

__all__ = ("HedgeTimer",)

# Times the median: what is quicker is no straggler.
_LATE = 2.0
# Nor is what took less than this: a second request saves less than it costs.
_MIN_S = 0.02
# So many answers of one way before its times say anything of its tail: a 95th percentile of fewer is their maximum.
_MIN = 20
# The times that count: few enough to follow a link that changes, enough to place a 95th percentile.
_REMEMBERED = 128


class HedgeTimer:
    """Knows how long answers took, and so which request is a straggler.

    The rule is the hedged request of Dean and Barroso, "The Tail at Scale", Communications of the ACM 56(2), 2013: ask
    again once a request is under way for longer than a high quantile of those before it. Of all requests at most the
    share above the quantile are then made twice, and this is held to also where times change at once, as when a link
    becomes slow: then every request looks like a straggler, and a second one would only make it slower. Where times
    hardly differ, as at a node that computes all the time, those above the quantile are not late: a straggler also
    took twice the median, and 20 ms. A large request takes longer than a small one: it is compared with those that were
    at least as large.

    Requests are of a way, any value, and compared with those of the same; their size is in rows or in bytes.

    Args:
        quantile: above 0 and below 1; 1 never asks twice.
    """

    def __init__(self, quantile: float) -> None:
        self._quantile = quantile
        self._ways: dict[Hashable, _Way] = {}

    def took(self, way: Hashable, size: int, seconds: float) -> None:
        """An answer came whole after so many seconds."""
        known = self._ways.setdefault(way, _Way())
        known.finished += 1
        known.times.append((size, seconds))
        known.late_after_s.clear()

    def hedged(self, way: Hashable) -> None:
        """A second request was made."""
        self._ways[way].hedged += 1

    def late_after_s(self, way: Hashable, size: int) -> float | None:
        """From when on a request of this way and size is a straggler; None where it is not made twice now."""
        known = self._ways.get(way)
        if known is None or known.hedged >= (1 - self._quantile) * known.finished:
            return None
        if size not in known.late_after_s:
            known.late_after_s[size] = self._late(sorted(took for other, took in known.times if other >= size))
        return known.late_after_s[size]

    def _late(self, times: Sequence[float]) -> float | None:
        if len(times) < _MIN:
            return None
        return max(_rank(times, self._quantile), _LATE * _rank(times, 0.5), _MIN_S)


@dataclass(slots=True)
class _Way:
    times: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    finished: int = 0
    hedged: int = 0
    late_after_s: dict[int, float | None] = field(default_factory=dict)


def _rank(times: Sequence[float], quantile: float) -> float:
    """The nearest-rank quantile: one of the times themselves, which ascend."""
    return times[math.ceil(quantile * len(times)) - 1]
