"""Decides how many requests are under way at once: by trying more while the loop waits, and fewer where they queue."""

import math
import statistics
from collections import deque
from dataclasses import dataclass, field, replace

from frostline.core.units import in_bytes, in_percent, in_seconds
from frostline.tuning.periods import Period

__all__ = ("Move", "Parallelism")

# Waiting for less of the time is no waiting, and for more is some; between them nothing is changed.
_FED, _WAITS = 0.01, 0.03
# One period's gain that can be no noise; and one that is worth a setting once three periods say so.
_CLEAR_GAIN, _GAIN = 0.10, 0.03
# What fewer requests may cost: nothing that can be told from noise.
_LOSS, _CLEAR_LOSS = 0.02, 0.07
_TRIES = 3
# A search doubles, as slow start does, and leaps where the rate grew nearly as much as the requests; a probe of a
# settled setting goes half a step.
_SEARCH, _LEAP, _PROBE = 2.0, 4.0, 1.5
_SCALES = 0.7
# A probe is dear where it fails: each that does doubles the time until the next. It never becomes longer than this.
_FIRST_REST_S, _LONGEST_REST_S = 5.0, 20.0
# Rates that differ so much from the settled one are news; twice in a row, since once may be a pause of the machine.
_NEWS = 0.25
# The quickest request of so long ago says nothing of the link as it is now.
_QUICKEST_S = 60.0
# Fed for so long before it has fewer, and so long before what went wrong is tried again.
_FED_S, _CAUTION_S = 3.0, 60.0
# No fewer are tried than so many times the rate times the shortest time, as many as BBR holds under way at most; and
# only where these are so many fewer.
_AMPLE, _LESS = 2.0, 0.8
# One answer on the way while another is read.
_MIN = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Another number of requests.

    Attributes:
        requests: under way at once from now on.
        is_trial: whether it is only tried.
        reason: measurement behind it.
    """

    requests: int
    is_trial: bool = False
    reason: str


@dataclass(slots=True, kw_only=True)
class _Base:
    """The setting that is kept, and what it gave.

    Attributes:
        requests: under way at once.
        rates: rates of its last periods.
        settled: its rate when the rest began.
        before: the rate from which the steps down began, so that their losses do not add up; 0 where there were none.
        is_leap: it was reached by a leap just now, so that half of it was never tried.
    """

    requests: int
    rates: deque[float] = field(default_factory=lambda: deque(maxlen=5))
    settled: float = 0.0
    before: float = 0.0
    is_leap: bool = False

    @property
    def rate(self) -> float:
        return statistics.median(self.rates)

    @property
    def noise(self) -> float:
        """Spread of its rates: the median distance from their median, scaled to a standard deviation."""
        if len(self.rates) < 3:
            return 0.0
        return min(0.1, 1.48 * statistics.median([abs(rate - self.rate) for rate in self.rates]) / self.rate)


@dataclass(slots=True, kw_only=True)
class _Trial:
    requests: int
    factor: float
    rates: list[float] = field(default_factory=list)

    @property
    def is_up(self) -> bool:
        return self.factor > 1


class Parallelism:
    """Climbs while the loop waits and more requests bring more; goes down where fewer bring as much.

    By Little's law (Operations Research 9(3), 1961) the requests under way are the rate times the time that each
    takes. While the link and the store have room, more requests are a higher rate; where one of them has none left,
    only the time grows. So a number is enough when it is the rate times the *shortest* time, which is what BBR holds
    under way (Cardwell et al., ACM Queue 14(5), 2016), and what is beyond it waits in a queue, which is what Vegas
    counts (Brakmo, O'Malley and Peterson, SIGCOMM 1994). Here the queue only says in which direction it is worth
    trying. What is kept is what gave the higher rate, in medians of periods, beyond their noise.

    It rests between tries, for at most 20 s; a rate that changes by a quarter ends the rest. Where the loop does not
    wait, it keeps what Little's law asks for and half as much again.

    Args:
        requests: to begin with.
        maximum: largest setting that it may choose.
    """

    def __init__(self, requests: int, *, maximum: int) -> None:
        self._maximum = maximum
        self._base = _Base(requests=min(requests, maximum))
        self._trial: _Trial | None = None
        self._tries: deque[float] = deque((_SEARCH, 1 / _SEARCH))
        self._rest_s = _FIRST_REST_S
        self._rests_until_s = -math.inf
        self._quickest: deque[tuple[float, float]] = deque()
        self._surprises: list[float] = []
        self._fed_since_s: float | None = None
        self._floor, self._floor_until_s = _MIN, -math.inf
        self._ceiling, self._ceiling_until_s = maximum, -math.inf
        self._caution_s = _CAUTION_S

    @property
    def requests(self) -> int:
        """In force now, tried or kept."""
        return self._base.requests if self._trial is None else self._trial.requests

    @property
    def kept(self) -> int:
        """The number that is kept while another is tried."""
        return self._base.requests

    @property
    def is_settled(self) -> bool:
        """Nothing is being tried, and there is no try left before a rest."""
        return self._trial is None and not self._tries

    def took(self, seconds: float, now_s: float) -> None:
        """A request took so long; the shortest time of the last minute is the one without a queue."""
        while self._quickest and self._quickest[0][0] < now_s - _QUICKEST_S:
            self._quickest.popleft()
        while self._quickest and self._quickest[-1][1] >= seconds:
            self._quickest.pop()
        self._quickest.append((now_s, seconds))

    def refused(self, in_flight: int, now_s: float) -> Move | None:
        """Requests failed with so many under way: fewer for a minute, and longer each time that it happens again."""
        if now_s < self._ceiling_until_s and in_flight > self._ceiling:
            return None  # they were sent before the ceiling held
        self._ceiling = max(1, int(0.75 * min(in_flight, self.requests)))
        self._ceiling_until_s = now_s + self._caution_s
        self._caution_s = min(2 * self._caution_s, 16 * _CAUTION_S)
        if self.requests <= self._ceiling:
            return None
        before, self._trial = self.requests, None
        self._settle(min(self._base.requests, self._ceiling), [])
        self._rest(now_s)
        return Move(requests=self._base.requests, reason=f"requests failed with {before} under way")

    def judge(self, period: Period, max_bytes: int) -> Move | None:
        """What comes of a period; another number of requests, where it is worth trying or keeping.

        Args:
            period: with the requests in force.
            max_bytes: largest number of bytes that may be under way.
        """
        if self._trial is not None:
            return self._tried(self._trial, period, max_bytes)
        self._base.rates.append(period.bytes_per_s)
        if period.stalled < _FED:
            return self._fewer(period)
        was_fed, self._fed_since_s = self._fed_since_s is not None, None
        if period.stalled < _WAITS:
            return None
        self._wake(period, was_fed=was_fed)
        return self._next_try(period, max_bytes)

    def _wake(self, period: Period, *, was_fed: bool) -> None:
        """End a rest that is over, or that what happened made pointless."""
        if self._tries:
            return
        if was_fed:
            self._floor, self._floor_until_s = self._base.requests + 1, period.now_s + self._caution_s
            self._search(period, (_SEARCH,))
        elif self._is_news(period):
            self._search(period, (_SEARCH, 1 / _SEARCH))
        elif period.now_s >= self._rests_until_s:
            self._tries.extend((_PROBE, 1 / _PROBE))

    def _search(self, period: Period, tries: tuple[float, ...]) -> None:
        self._rest_s = _FIRST_REST_S
        self._base.rates.clear()
        self._base.rates.append(period.bytes_per_s)
        self._tries.extend(tries)

    def _is_news(self, period: Period) -> bool:
        settled = self._base.settled
        apart = abs(period.bytes_per_s / settled - 1) if settled else 0.0
        self._surprises = [*self._surprises, apart] if apart > max(_NEWS, 3 * self._base.noise) else []
        return len(self._surprises) >= 2

    def _next_try(self, period: Period, max_bytes: int) -> Move | None:
        while self._tries:
            factor = self._tries[0]
            requests = self._target(factor, period, max_bytes)
            if requests is not None:
                self._trial = _Trial(requests=requests, factor=factor)
                return Move(requests=requests, is_trial=True, reason=self._why(self._trial, period))
            self._tries.popleft()
            if not self._tries:
                self._rest(period.now_s)
        return None

    def _target(self, factor: float, period: Period, max_bytes: int) -> int | None:
        """What a try would set; None where it is not worth trying."""
        now = self._base.requests
        if factor > 1:
            fits = max(1, int(max_bytes / period.request_bytes))
            maximum = min(self._maximum, fits, self._ceiling if period.now_s < self._ceiling_until_s else self._maximum)
            target = min(maximum, max(now + 1, math.ceil(factor * now)))
            return target if target > now and period.full < 0.5 else None
        minimum = max(_MIN, self._floor if period.now_s < self._floor_until_s else 0)
        target = max(minimum, math.floor(factor * now))
        # A queue that never empties hides what the link takes without it: seldom, fewer are tried whatever it says.
        if self._rest_s >= _LONGEST_REST_S:
            return target if target < now else None
        if not self._base.is_leap:
            target = max(target, self._ample(period))
        return target if target <= _LESS * now else None

    def _ample(self, period: Period) -> int:
        """Requests that need not be as slow as those of the period, by Little's law, and as many again."""
        return math.ceil(_AMPLE * period.in_flight * min(1.0, self._quickest[0][1] / period.median_s))

    def _why(self, trial: _Trial, period: Period) -> str:
        if trial.is_up:
            return f"the loop waits {in_percent(period.stalled)} of the time: are {trial.requests} requests faster?"
        return (
            f"requests take {in_seconds(period.median_s)}, the quickest {in_seconds(self._quickest[0][1])}: "
            f"are {trial.requests} as fast?"
        )

    def _tried(self, trial: _Trial, period: Period, max_bytes: int) -> Move | None:
        trial.rates.append(period.bytes_per_s)
        rate = statistics.median(trial.rates)
        gain = rate / (self._base.rate if trial.is_up else max(self._base.rate, self._base.before)) - 1
        verdict = self._more_is_better(trial, gain) if trial.is_up else self._fewer_are_enough(trial, gain)
        if period.stalled < _FED:
            verdict = True
        if verdict is None:
            return None
        self._trial = None
        if not verdict:
            return self._go_back(trial, rate, period.now_s)
        kept = self._keep(trial, rate, gain)
        # What was tried is measured already: a link that has room is not kept waiting for another period of the same.
        further = self._next_try(period, max_bytes) if trial.is_up and period.stalled >= _WAITS else None
        return kept if further is None else replace(further, reason=f"{kept.reason}; {further.reason}")

    def _more_is_better(self, trial: _Trial, gain: float) -> bool | None:
        if gain >= max(_CLEAR_GAIN, 3 * self._base.noise):
            return True
        # The first period may show new connections that are still slow; the second no more.
        if len(trial.rates) < 2 or (gain > 0 and len(trial.rates) < _TRIES):
            return None
        return gain >= max(_GAIN, self._base.noise)

    def _fewer_are_enough(self, trial: _Trial, gain: float) -> bool | None:
        if gain < -max(_CLEAR_LOSS, 2 * self._base.noise):
            return False
        return None if len(trial.rates) < _TRIES else gain >= -_LOSS

    def _keep(self, trial: _Trial, rate: float, gain: float) -> Move:
        """Keep what was tried, and go on in its direction: what lies in the other one was worse."""
        tries = self._further(trial, gain)
        words = f"{in_bytes(rate)}/s with {trial.requests}, {in_bytes(self._base.rate)}/s with {self._base.requests}"
        before = 0.0 if trial.is_up else max(self._base.rate, self._base.before)
        self._settle(trial.requests, trial.rates, before=before, is_leap=trial.factor == _LEAP)
        self._tries = deque(tries)
        if trial.is_up:
            self._rest_s = _FIRST_REST_S
        return Move(requests=trial.requests, reason=words)

    def _further(self, trial: _Trial, gain: float) -> tuple[float, ...]:
        """Where to go on: by a leap where the link has room for all that was added, back by half after one too far."""
        if not trial.is_up:
            return (trial.factor,)
        if gain >= _SCALES * (trial.requests / self._base.requests - 1):
            return (_LEAP, _SEARCH)
        return (1 / _SEARCH,) if trial.factor == _LEAP else (trial.factor,)

    def _go_back(self, trial: _Trial, rate: float, now_s: float) -> Move:
        before = self._base
        self._tries.popleft()
        if not self._tries:
            self._rest(now_s)
        words = f"{in_bytes(rate)}/s with {trial.requests}, {in_bytes(before.rate)}/s with {before.requests}"
        return Move(requests=before.requests, reason=words)

    def _settle(self, requests: int, rates: list[float], *, before: float = 0.0, is_leap: bool = False) -> None:
        self._base = _Base(requests=requests, before=before, is_leap=is_leap)
        self._base.rates.extend(rates)

    def _rest(self, now_s: float) -> None:
        self._tries.clear()
        self._surprises = []
        self._base.settled = self._base.rate if self._base.rates else 0.0
        self._base.before, self._base.is_leap = 0.0, False
        self._rests_until_s = now_s + self._rest_s
        self._rest_s = min(2 * self._rest_s, _LONGEST_REST_S)

    def _fewer(self, period: Period) -> Move | None:
        """The loop does not wait: what it takes needs so many requests, and half as many again for the spread."""
        self._tries.clear()
        if self._fed_since_s is None:
            self._fed_since_s = period.now_s
        minimum = self._floor if period.now_s < self._floor_until_s else 1
        now = self._base.requests
        target = max(minimum, now // 2, math.ceil(1.5 * period.in_flight) + 1)
        if period.now_s - self._fed_since_s < _FED_S or target > 0.75 * now:
            return None
        self._fed_since_s = period.now_s
        self._settle(target, [])
        return Move(requests=target, reason=f"the loop does not wait, with {period.in_flight:.1f} under way")
