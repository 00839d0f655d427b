"""Decides how deep a window is and how many requests are under way, while it runs. Pure: no clock, no threads.

Decides by PRISMA's rule for producers and buffer, to compare with: it grows, and then it stops for ever.
"""

import math
import statistics
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Protocol

from frostline.core.config import LoaderSettings
from frostline.core.units import in_bytes, in_percent, in_seconds

__all__ = (
    "AutoTuning",
    "Depth",
    "FixedWindow",
    "Move",
    "NewBounds",
    "Observation",
    "Parallelism",
    "Period",
    "Periods",
    "Prisma",
    "Setting",
    "TuningRule",
    "rule_of",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Bounds of a window: those in force, or the most that a rule may choose.

    Attributes:
        requests: the requests under way at once.
        window_bytes: the bytes, asked for and not yet handed out.
    """

    requests: int
    window_bytes: int

    def __post_init__(self) -> None:
        if self.requests < 1 or self.window_bytes < 1:
            raise ValueError(f"a window needs a request and a byte at least, not {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What a window did since the look before, and where it stands.

    Attributes:
        now_s: the time.
        seconds: the seconds since the look before.
        bytes_arrived: the bytes arrived in them.
        bytes_handed_out: the bytes handed out in them.
        stalled_s: seconds of these in which the training loop waited for rows.
        took_s: the time that each request took that was answered whole in them; not those that were made twice.
        failures: requests that failed in them.
        ready_bytes: the bytes, arrived and not handed out.
        expected_bytes: the bytes, asked for and not arrived.
        requests_in_flight: the requests under way.
        requests_allowed: requests that may be under way; fewer than set while the window opens step by step.
        is_full: bytes, and not the number of requests, keep the window from asking.
        is_ending: True if nothing is left to ask for.
    """

    now_s: float
    seconds: float
    bytes_arrived: int
    bytes_handed_out: int
    stalled_s: float
    took_s: tuple[float, ...]
    failures: int
    ready_bytes: int
    expected_bytes: int
    requests_in_flight: int
    requests_allowed: int
    is_full: bool
    is_ending: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class NewBounds:
    """Other bounds from now on.

    Attributes:
        before: bounds that were kept until now.
        after: the value in force from now on.
        is_trial: True if they are only tried; what comes of it is the next change.
        reason: measurement behind it, in one sentence.
    """

    before: Setting
    after: Setting
    is_trial: bool = False
    reason: str


class TuningRule(Protocol):
    """Chooses a window's bounds. It decides how fast rows come, never which ones or in what order."""

    @property
    def setting(self) -> Setting:
        """The bounds in force."""

    def look(self, look: Observation) -> NewBounds | None:
        """Take what the window did since the look before; other bounds, where these are better."""


class FixedWindow:
    """What was set stays: to compare with, and for whoever knows better."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting

    def look(self, look: Observation) -> NewBounds | None:  # noqa: ARG002 - whatever comes
        """Nothing changes."""
        return None


# A period is shorter where requests are: in less, the consumer's batches and the processor's other work are all noise.
_MIN_S = 0.25
# A period has so many rounds of all requests under way: they come in bursts, and a part of a round would be no rate.
_ROUNDS = 2
_MIN_PERIODS = 8
_REMEMBERED = 256
_LATE = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Period:
    """What a setting gave while nothing changed.

    Attributes:
        now_s: the time when it ended.
        seconds: length of the period.
        bytes_per_s: bytes a second that arrived.
        request_bytes: bytes of one request, on average.
        median_s: seconds that requests took.
        late_s: seconds that one in twenty exceeded, lately.
        in_flight: requests under way, on average.
        stalled: share of the time in which the training loop waited.
        full: share of the looks at which bytes kept the window from asking.
    """

    now_s: float
    seconds: float
    bytes_per_s: float
    request_bytes: float
    median_s: float
    late_s: float
    in_flight: float
    stalled: float
    full: float


class Periods:
    """Joins looks to periods. Each begins when what was asked for under earlier bounds has come.

    Args:
        requests: number of requests that are set.
    """

    def __init__(self, requests: int) -> None:
        self._times: deque[float] = deque(maxlen=_REMEMBERED)
        self._requests = requests
        self.restart(requests)

    def restart(self, requests: int) -> None:
        """Other bounds hold from now on."""
        if requests != self._requests:
            self._times.clear()
        self._requests = requests
        self._to_come: int | None = None
        self._begin()

    def _begin(self) -> None:
        self._looks: list[Observation] = []
        self._seconds, self._finished, self._under_way, self._bytes = 0.0, 0, 0, 0

    def add(self, look: Observation) -> Period | None:
        """Take a look; a period, where one has ended with it."""
        self._times.extend(look.took_s)
        if look.is_ending or look.failures or look.requests_allowed < self._requests:
            self.restart(self._requests)
            return None
        if self._to_come is None:
            self._to_come = look.requests_in_flight
            return None
        if self._to_come > 0:
            self._to_come -= len(look.took_s)
            return None
        self._looks.append(look)
        self._seconds += look.seconds
        self._finished += len(look.took_s)
        self._under_way += look.requests_in_flight
        self._bytes += look.bytes_arrived
        if not self._is_whole():
            return None
        period = self._period()
        self._begin()
        return period

    def _is_whole(self) -> bool:
        under_way = max(1, round(self._under_way / len(self._looks)))
        # What ends within this look ends its round: rounds are whole at the look at which their last request came.
        is_round = self._finished % under_way < max(1, len(self._looks[-1].took_s))
        is_long = self._seconds >= _MIN_S and self._finished >= max(_MIN_PERIODS, _ROUNDS * under_way)
        return self._bytes > 0 and is_long and is_round  # samples that cannot be read have no bytes

    def _period(self) -> Period:
        looks = self._looks
        seconds, nbytes = self._seconds, self._bytes
        took_s = [took for look in looks for took in look.took_s]
        late = sorted(self._times)[int(_LATE * (len(self._times) - 1))]
        return Period(
            now_s=looks[-1].now_s,
            seconds=seconds,
            bytes_per_s=nbytes / seconds,
            request_bytes=nbytes / len(took_s),
            median_s=statistics.median(took_s),
            late_s=late,
            in_flight=self._under_way / len(looks),
            stalled=sum(look.stalled_s for look in looks) / seconds,
            full=sum(look.is_full for look in looks) / len(looks),
        )


# Waiting for less of the time is no waiting, and for more is some; between them nothing is changed.
_FED, _LOOP_WAITS = 0.01, 0.03
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
_AMPLE_REQUESTS, _LESS = 2.0, 0.8
# One answer on the way while another is read.
_MIN_REQUESTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Another number of requests.

    Attributes:
        requests: the requests under way at once from now on.
        is_trial: True if it is only tried.
        reason: measurement behind it.
    """

    requests: int
    is_trial: bool = False
    reason: str


@dataclass(slots=True, kw_only=True)
class _Base:
    """The setting that is kept, and what it gave.

    Attributes:
        requests: the requests under way at once.
        rates: rates of its last periods.
        settled: the rate when the rest began.
        before: the rate from which the steps down began, so that their losses do not add up; 0 where there were none.
        is_leap: True if it was reached by a leap just now, so that half of it was never tried.
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
    takes. While link and store have capacity left, more requests are a higher rate; where one of them has none left,
    only the time grows. So a number is enough when it is the rate times the *shortest* time, which is what BBR holds
    under way (Cardwell et al., ACM Queue 14(5), 2016), and what is beyond it waits in a queue, which is what Vegas
    counts (Brakmo, O'Malley and Peterson, SIGCOMM 1994). Here the queue only says in which direction it is worth
    trying. What is kept is what gave the higher rate, in medians of periods, beyond their noise.

    It rests between tries, for at most 20 s; a rate that changes by a quarter ends the rest. Where the loop does not
    wait, it keeps what Little's law asks for and half as much again.

    Args:
        requests: the requests to begin with.
        maximum: the largest setting that it may choose.
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
        self._floor, self._floor_until_s = _MIN_REQUESTS, -math.inf
        self._ceiling, self._ceiling_until_s = maximum, -math.inf
        self._caution_s = _CAUTION_S

    @property
    def requests(self) -> int:
        """The number of requests in force now, tried or kept."""
        return self._base.requests if self._trial is None else self._trial.requests

    @property
    def kept(self) -> int:
        """The number that is kept while another is tried."""
        return self._base.requests

    @property
    def is_settled(self) -> bool:
        """Nothing is being tried, and there is no try left before a rest."""
        return self._trial is None and not self._tries

    def record(self, seconds: float, now_s: float) -> None:
        """A request took so long; the shortest time of the last minute is the one without a queue."""
        while self._quickest and self._quickest[0][0] < now_s - _QUICKEST_S:
            self._quickest.popleft()
        while self._quickest and self._quickest[-1][1] >= seconds:
            self._quickest.pop()
        self._quickest.append((now_s, seconds))

    def note_refusal(self, in_flight: int, now_s: float) -> Move | None:
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
            period: the period with the requests in force.
            max_bytes: the largest number of bytes that may be under way.
        """
        if self._trial is not None:
            return self._tried(self._trial, period, max_bytes)
        self._base.rates.append(period.bytes_per_s)
        if period.stalled < _FED:
            return self._fewer(period)
        was_fed, self._fed_since_s = self._fed_since_s is not None, None
        if period.stalled < _LOOP_WAITS:
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
        if len(self._tries) > 1 and self._tries[0] == _SEARCH and self._queues(period):
            self._tries.rotate(-1)  # more would only wait longer, for minutes where the link is thin
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
        minimum = max(_MIN_REQUESTS, self._floor if period.now_s < self._floor_until_s else 0)
        target = max(minimum, math.floor(factor * now))
        # A queue that never empties hides what the link takes without it: seldom, fewer are tried whatever it says.
        if self._rest_s >= _LONGEST_REST_S:
            return target if target < now else None
        if not self._base.is_leap:
            target = max(target, self._ample(period))
        return target if target <= _LESS * now else None

    def _queues(self, period: Period) -> bool:
        """Whether fewer requests would still be as many again as those that wait for nobody."""
        return self._ample(period) <= _LESS * self._base.requests

    def _ample(self, period: Period) -> int:
        """Requests that need not be as slow as those of the period, by Little's law, and as many again."""
        return math.ceil(_AMPLE_REQUESTS * period.in_flight * min(1.0, self._quickest[0][1] / period.median_s))

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
        # What was tried is measured already: a link with capacity to spare waits for no further period of the same.
        further = self._next_try(period, max_bytes) if trial.is_up and period.stalled >= _LOOP_WAITS else None
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
        """Where to go on: by a leap where the link carries all that was added, back by half after one too far."""
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
    the window too, the window has capacity for the slots and for one request of each producer.

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
        first: the value to begin with.
    """

    def __init__(self, maximum: int, *, first: int) -> None:
        self._maximum = maximum
        self._times = 1.0
        self._patient_until_s = 0.0
        self.nbytes = min(first, maximum)

    def judge(self, period: Period, requests: int, *, may_shrink: bool) -> str | None:
        """Take a period; why ``nbytes`` is another from now on, None where it stays.

        Args:
            period: the period under the bounds in force.
            requests: number of requests that are kept, or tried.
            may_shrink: True if nothing else is being tried.
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
        requests: the requests to begin with.
        window_bytes: the bytes to begin with; None is all of ``maximum``, since nothing is known.
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
            return self._moved(
                self._parallelism.note_refusal(look.requests_in_flight + look.failures, look.now_s), before
            )
        for seconds in look.took_s:
            self._parallelism.record(seconds, look.now_s)
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
    return FixedWindow(maximum)
