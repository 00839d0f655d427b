"""Decides when a setting has been in force for long enough to be measured, and what it gave."""

import statistics
from collections import deque
from dataclasses import dataclass
from typing import Protocol

__all__ = ("NewBounds", "Observation", "Period", "Periods", "Setting", "Steady", "TuningRule")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Bounds of a window: those in force, or the most that a rule may choose.

    Attributes:
        requests: under way at once.
        window_bytes: asked for and not yet handed out.
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
        now_s: when.
        seconds: since the look before.
        bytes_arrived: in them.
        bytes_handed_out: in them.
        stalled_s: seconds of these in which the training loop waited for rows.
        took_s: how long each request took that was answered whole in them; not those that were made twice.
        failures: requests that failed in them.
        ready_bytes: arrived and not handed out.
        expected_bytes: asked for and not arrived.
        requests_in_flight: under way.
        requests_allowed: requests that may be under way; fewer than set while the window opens step by step.
        is_full: bytes, and not the number of requests, keep the window from asking.
        is_ending: nothing is left to ask for.
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
        after: in force from now on.
        is_trial: whether they are only tried; what comes of it is the next change.
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


class Steady:
    """What was set stays: to compare with, and for whoever knows better.

    Args:
        setting: the bounds.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting = setting

    def look(self, look: Observation) -> NewBounds | None:  # noqa: ARG002 - whatever comes
        """Nothing changes."""
        return None


# A period is shorter where requests are: in less, the consumer's batches and the processor's other work are all noise.
_MIN_S = 0.25
# A period has so many rounds of all requests under way: they come in bursts, and a part of a round would be no rate.
_ROUNDS = 2
_MIN = 8
_REMEMBERED = 256
_LATE = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Period:
    """What a setting gave while nothing changed.

    Attributes:
        now_s: when it ended.
        seconds: how long it was.
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
        is_long = self._seconds >= _MIN_S and self._finished >= max(_MIN, _ROUNDS * under_way)
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
