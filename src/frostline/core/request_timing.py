"""Decides when a request is made: within the rate that a store allows, and again where an answer is late."""

import math
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

__all__ = (
    "AdaptiveRate",
    "HedgeTimer",
    "TokenBucket",
)


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
        quantile: the quantile above 0 and below 1; 1 never asks twice.
    """

    def __init__(self, quantile: float) -> None:
        self._quantile = quantile
        self._ways: dict[Hashable, _Way] = {}

    def record(self, way: Hashable, size: int, seconds: float) -> None:
        """An answer came whole after so many seconds."""
        known = self._ways.setdefault(way, _Way())
        known.finished += 1
        known.times.append((size, seconds))
        known.late_after_s.clear()

    def count_hedge(self, way: Hashable) -> None:
        """A second request was made."""
        self._ways[way].hedged += 1

    def late_after_s(self, way: Hashable, size: int) -> float | None:
        """Seconds after which a request of this way and size is a straggler; None where it is not made twice now."""
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


# Times the rate that was refused last.
_NEAR = (0.9, 1.25)
# The first rate that was in force for so long before it was refused tells what the store allows.
_SETTLED_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBucket:
    """So many requests a second, and some at once after a pause.

    Attributes:
        per_s: tokens that come back each second.
        maximum: tokens that it holds at most, and to begin with.
        tokens: tokens that it holds; negative where requests wait for some.
        at_s: the time when it held those.
    """

    per_s: float
    maximum: float
    tokens: float
    at_s: float

    def __post_init__(self) -> None:
        if not self.per_s > 0 or not self.maximum >= 1:
            raise ValueError("a bucket takes more than no request a second, and one at least at once")

    @classmethod
    def create(cls, per_s: float, *, maximum: float, now_s: float) -> "TokenBucket":
        """One that nobody has used."""
        return cls(per_s=per_s, maximum=maximum, tokens=maximum, at_s=now_s)

    def take(self, now_s: float) -> "tuple[TokenBucket, float]":
        """Take a token; the bucket after that, and how long its taker waits before it goes on."""
        now_s = max(now_s, self.at_s)
        tokens = min(self.maximum, self.tokens + (now_s - self.at_s) * self.per_s) - 1
        return replace(self, tokens=tokens, at_s=now_s), max(0.0, -tokens / self.per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveRate:
    """A rate just under what a store allows: it grows while all goes well, and falls when the store refuses.

    Increase and multiplicative decrease, as TCP does (Chiu and Jain, 1989), slow near the rate that was refused last
    and fast elsewhere (as CUBIC is, RFC 9438). There is no bound until the store refuses for the first time; then it
    begins with what went well in the second before. Refusals of what was sent before the last fall tell nothing new
    and change nothing. One request at a time should wait to be admitted, so that a rate that fell holds for the next.

    Attributes:
        rate_per_s: requests that may go each second; infinite until the store has refused.
        refused_per_s: the rate that was refused last, after the burst before the first bound; 0 where none was.
        free_at_s: the time when the next may go.
        fell_at_s: the time when the rate fell last.
        changed_at_s: the time when the rate changed last.
        since_s: the time when this second of counting began.
        went_well: requests that went well since then.
        seen_per_s: requests a second that went well in the second before.
        fall: part of the rate that is left after a refusal.
        rise_per_s: the share by which of itself the rate grows each second where it is near what was refused.
        climb_per_s: share of itself by which the rate grows each second elsewhere.
        min_per_s: True if it falls no further.
    """

    rate_per_s: float = math.inf
    refused_per_s: float = 0.0
    free_at_s: float = -math.inf
    fell_at_s: float = -math.inf
    changed_at_s: float = -math.inf
    since_s: float = -math.inf
    went_well: int = 0
    seen_per_s: float = 0.0
    fall: float = 0.85
    rise_per_s: float = 0.02
    climb_per_s: float = 1.0
    min_per_s: float = 0.5

    @property
    def is_bounded(self) -> bool:
        """Whether the store has ever refused."""
        return self.rate_per_s < math.inf

    def admit(self, now_s: float) -> "tuple[AdaptiveRate, float]":
        """Send a request; the state after that, and how long its sender waits before it goes."""
        if not self.is_bounded:
            return self, 0.0
        goes_at_s = max(now_s, self.free_at_s)
        return replace(self, free_at_s=goes_at_s + 1 / self.rate_per_s), goes_at_s - now_s

    def speed_up(self, now_s: float) -> "AdaptiveRate":
        """A request went well."""
        counted = self._counted(now_s)
        if not self.is_bounded:
            return counted
        return replace(
            counted, rate_per_s=self._grown(min(1.0, max(0.0, now_s - self.changed_at_s))), changed_at_s=now_s
        )

    def slow_down(self, now_s: float, *, sent_at_s: float, wait_s: float = 0.0) -> "AdaptiveRate":
        """The store refused a request for its rate.

        Args:
            now_s: the time when that became known.
            sent_at_s: the time when the request went.
            wait_s: the time that the store asked to wait; none goes before that.
        """
        held = replace(self, free_at_s=max(self.free_at_s, now_s + wait_s)) if wait_s else self
        if sent_at_s <= self.fell_at_s:
            return held
        found = self.rate_per_s if self.is_bounded else max(self.seen_per_s, self._rate_so_far(now_s))
        rate = max(self.min_per_s, found * self.fall)
        # At the start a burst has emptied what the store allows at once, and refusals tell nothing of the rate yet.
        tells = self.refused_per_s > 0 or (self.is_bounded and now_s - self.fell_at_s >= _SETTLED_S)
        return replace(
            held,
            rate_per_s=rate,
            refused_per_s=self.rate_per_s if tells else self.refused_per_s,
            free_at_s=max(held.free_at_s, now_s + 1 / rate),
            fell_at_s=now_s,
            changed_at_s=now_s,
        )

    def _grown(self, after_s: float) -> float:
        low, high = (times * self.refused_per_s for times in _NEAR)
        climbed = self.rate_per_s * (1 + self.climb_per_s * after_s)
        if self.rate_per_s < low:
            return min(climbed, low)
        return climbed if self.rate_per_s > high else self.rate_per_s * (1 + self.rise_per_s * after_s)

    def _counted(self, now_s: float) -> "AdaptiveRate":
        if now_s - self.since_s < 1:
            return replace(self, went_well=self.went_well + 1)
        seen = self._rate_so_far(now_s) if now_s - self.since_s < math.inf else 0.0
        return replace(self, since_s=now_s, went_well=1, seen_per_s=seen)

    def _rate_so_far(self, now_s: float) -> float:
        # Of less than a second's counting nothing above its count can be said.
        return self.went_well / max(1.0, now_s - self.since_s)
