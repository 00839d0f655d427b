"""Deals requests by the plan, measures while the job runs, and changes the plan for what was not asked for yet."""

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from frostline.core import Cut, FeatureBatch, Route
from frostline.core.errors import SettingError
from frostline.core.events import (
    BatchDelivered,
    EpochFinished,
    EpochStarted,
    Event,
    Observer,
    Replanned,
    WaitingForRows,
)
from frostline.planning import Plan, Situation
from frostline.planning.replanning import (
    SILENCE_S,
    Observed,
    Rates,
    as_measured,
    find_better,
    is_news,
    learn,
    mixture_in_words,
    probe,
)
from frostline.prefetch import NextRequest, ShortestWait, WeightedRoutes
from frostline.transport import Transport, TransportStatistics

__all__ = ("BothSides", "Clocks", "PlanFollower", "Router")

# A look costs a linear programme of milliseconds, and a second holds enough to measure on.
_LOOK_S = 1.0
# Seconds between two batches at which it is measured how busy each part is.
_MEASURE_S = 5.0
# A loop that waits for less of its time has what it needs. What it waited for the last batches counts most.
_LITTLE, _NEWEST = 0.1, 0.25
_HERE = Route(0)
"""The way of samples whose frozen layers the trainer runs."""
# A plan must promise so many times what both sides do without one: predictions are off by as much.
_BETTER = 1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Clocks:
    """What tells the time.

    Attributes:
        wall: seconds of a monotonic clock.
        busy: seconds of this process on any core.
    """

    wall: Callable[[], float]
    busy: Callable[[], float]


class BothSides:
    """A ``RequestSource`` of samples to both sides of a job, each where it should be done first. Safe for threads.

    Args:
        ways: rule that deals the requests; it is used through this object alone.
    """

    def __init__(self, ways: ShortestWait) -> None:
        self._ways = ways
        self._lock = threading.Lock()
        self._waited, self._row_s = 1.0, math.inf
        self._taken_at: float | None = None

    @property
    def assigned_samples(self) -> int:
        """See ``ShortestWait``."""
        return self._ways.assigned_samples

    @property
    def samples_per_s(self) -> float:
        """See ``ShortestWait``."""
        with self._lock:
            return self._ways.samples_per_s

    @property
    def is_bound(self) -> bool:
        """See ``ShortestWait``."""
        with self._lock:
            return self._ways.is_bound

    @property
    def shares(self) -> dict[Route, float]:
        """See ``ShortestWait``."""
        with self._lock:
            return self._ways.shares

    def next_request(self, left: int, again: Route | None = None) -> NextRequest:
        """See ``RequestSource``."""
        with self._lock:
            return self._ways.next_request(left, again)

    def takes(self, routes: Iterable[Route]) -> bool:
        """See ``ShortestWait``."""
        return self._ways.takes(routes)

    @property
    def has_choice(self) -> bool:
        """See ``ShortestWait``."""
        with self._lock:
            return self._ways.has_choice

    def close(self, route: Route, *, is_expected: bool = True) -> None:
        """See ``ShortestWait``."""
        with self._lock:
            self._ways.close(route, is_expected=is_expected)

    def open(self, route: Route, *, max_waiting: int | None = None) -> None:
        """See ``ShortestWait``."""
        with self._lock:
            self._ways.open(route, max_waiting=max_waiting)

    def observed_speed(self, route: Route) -> float:
        """See ``ShortestWait``."""
        with self._lock:
            return self._ways.observed_speed(route)

    def begin_again(self, route: Route, samples_per_s: float | None = None) -> None:
        """See ``ShortestWait``."""
        with self._lock:
            self._ways.begin_again(route, samples_per_s)

    def on_event(self, event: Event, now: float) -> None:
        """Spare the trainer's processor where its loop needs it more, for what it trains.

        That is so while the loop hardly waits, and where the nodes alone are as fast as the loop is at its best.

        Args:
            event: event of the job.
            now: seconds of a monotonic clock.
        """
        match event:
            case EpochStarted():
                self._waited, self._row_s, self._taken_at = 1.0, math.inf, None
            case BatchDelivered(stall_s=stall_s, samples=rows):
                if self._taken_at is not None:
                    took_s = max(now - self._taken_at, 1e-9)
                    self._waited += _NEWEST * (min(1.0, stall_s / took_s) - self._waited)
                    self._row_s = min(self._row_s, max(0.0, took_s - stall_s) / rows)
                self._taken_at = now
            case _:
                return
        with self._lock:
            others = sum(self._ways.observed_speed(route) for route in self._ways.shares if route != _HERE)
            is_needed = self._waited < _LITTLE or (self._row_s < math.inf and self._row_s * others >= 1.0)
            self._ways.spare(_HERE if is_needed else None)

    def finish_rows(self, route: Route, rows: int) -> None:
        """See ``ShortestWait``."""
        with self._lock:
            self._ways.finish_rows(route, rows)

    def drop_rows(self, route: Route, rows: int) -> None:
        """See ``ShortestWait``."""
        with self._lock:
            self._ways.drop_rows(route, rows)


class Router:
    """A ``RequestSource`` that follows what is measured. Safe for several threads.

    Args:
        cuts: cuts of the job, by number.
        shares: shares of the samples, by way, where there is no plan.
        plan: the plan to begin with; None where the ways are given and stay.
        situation: situation that the plan was made from.
        follows: plan again while the job runs.
        samples_per_request: the most samples in one request.
        transport: transport whose connections are measured.
        cores: number of cores that this process may use.
        clocks: clocks to read.
        both_sides: router that deals requests to both sides as each is free, as long as there is no plan; None where
            ``shares`` count.
    """

    def __init__(
        self,
        *,
        cuts: Sequence[Cut],
        shares: Mapping[Route, float] | None = None,
        both_sides: BothSides | None = None,
        plan: Plan | None = None,
        situation: Situation | None = None,
        follows: bool = False,
        samples_per_request: int,
        transport: Transport,
        cores: int,
        clocks: Clocks,
    ) -> None:
        self._cuts = tuple(cuts)
        self._shares = dict(shares or {}) if plan is None else _shares(plan)
        self.first_plan = plan
        self._plan = plan
        self._profiled = situation
        self._situation = situation
        self._may_follow = follows
        self._are_given = False
        self._follows = follows and situation is not None
        self._transport = transport
        self._cores = cores
        self._clocks = clocks
        self._lock = threading.Lock()
        self._samples_per_request = samples_per_request
        self._mixer: WeightedRoutes | BothSides = self._by_shares()
        if plan is None and both_sides is not None:
            self._mixer = both_sides
        self._rates = Rates()
        self._judged: Rates | None = None
        self._next_probe = 0.0
        self._born = clocks.wall()
        self._link_seen = self._born
        self._is_fetching = False
        self._since = _Since(at=self._born)
        self._allowed_bytes_per_s: Callable[[], float] = lambda: math.inf

    @property
    def age_s(self) -> float:
        """Seconds since the job was made."""
        return self._clocks.wall() - self._born

    @property
    def plan(self) -> Plan | None:
        """The plan by which requests are dealt now."""
        return self._plan

    @property
    def situation(self) -> Situation | None:
        """What the plan is made from, with what was measured by now."""
        return self._situation

    @property
    def are_both_sides(self) -> bool:
        """Whether requests go to node and trainer as each is free."""
        return isinstance(self._mixer, BothSides)

    @property
    def has_choice(self) -> bool:
        """Whether samples that are not asked for yet may take another way than those that are."""
        with self._lock:
            return not isinstance(self._mixer, BothSides) or self._mixer.has_choice

    @property
    def fixed_shares(self) -> Mapping[Route, float]:
        """Shares of the samples by way, as another process deals them, which does not see how fast each side is."""
        return dict(self._shares)

    @property
    def shares(self) -> Mapping[Route, float]:
        """Shares of the samples by way; of those that were dealt, where each goes where it is done first."""
        if isinstance(self._mixer, BothSides):
            with self._lock:
                return self._mixer.shares
        return dict(self._shares)

    def finish_rows(self, route: Route, rows: int) -> None:
        """Rows of a way are where the loop can have them."""
        with self._lock:
            if isinstance(self._mixer, BothSides):
                self._mixer.finish_rows(route, rows)

    def drop_rows(self, route: Route, rows: int) -> None:
        """Rows of a way come no more."""
        with self._lock:
            if isinstance(self._mixer, BothSides):
                self._mixer.drop_rows(route, rows)

    def count_on(self, allowed_bytes_per_s: Callable[[], float]) -> None:
        """Plan with the bytes a second that this says from now on, where the link gives more."""
        self._allowed_bytes_per_s = allowed_bytes_per_s

    def next_request(self, left: int, again: Route | None = None) -> NextRequest:
        """See ``RequestSource``."""
        with self._lock:
            return self._mixer.next_request(left, again)

    def use(self, shares: Mapping[Route, float], *, follow: bool) -> None:
        """Deal by these shares from now on, and follow what is measured or not.

        Raises:
            SettingError: The shares do not sum to one, or name a cut that is not there.
        """
        if not math.isclose(sum(shares.values()), 1, abs_tol=1e-6) or min(shares.values()) < 0:
            raise SettingError(f"the shares of a mixture sum to 1, and these sum to {sum(shares.values()):.6g}")
        for route in shares:
            if not 0 <= route.cut < len(self._cuts):
                raise SettingError(f"there is no cut {route.cut}: this job has cuts 0 to {len(self._cuts) - 1}")
        with self._lock:
            self._may_follow, self._are_given = follow, not follow
            self._follows = follow and self._profiled is not None
            self._rates, self._judged = self._rates.without_mixture(), None
            self._shares = dict(shares)
            self._deal_by_shares()

    def begin_plan(self, situation: Situation, plan: Plan) -> Replanned | None:
        """Deal by a plan from now on that is made from the first measurement of a job that has begun without one.

        Shares that somebody gave meanwhile, and that are to stay, do.
        """
        with self._lock:
            self._situation = situation
            if isinstance(self._mixer, BothSides) and plan.samples_per_s < _BETTER * self._mixer.samples_per_s:
                return None
            self.first_plan = self._plan = plan
            self._profiled = situation
            self._rates, self._judged = Rates(), None
            self._follows = self._may_follow
            self._begin()
            shares = _shares(plan)
            return None if self._are_given or shares == self._shares else self._changed(shares, plan.reason)

    def take_batch(self, route: Route, batch: FeatureBatch) -> None:
        """A batch arrived, as it came."""
        with self._lock:
            self._since.rows[route] += len(batch)

    def on_event(self, event: Event) -> Replanned | None:
        """Take an event, and now and then look whether another plan is better; the change is in force already."""
        if isinstance(self._mixer, BothSides):
            self._mixer.on_event(event, self._clocks.wall())
        if not self._follows:
            return None
        with self._lock:
            match event:
                case EpochStarted():
                    self._is_fetching = False
                case EpochFinished():
                    self._is_fetching = False
                case BatchDelivered():
                    self._taken(event)
                case WaitingForRows():
                    self._since.waits += 1
                case _:
                    pass
            if self._is_fetching and self._clocks.wall() - self._since.at >= _LOOK_S:
                return self._look()
        return None

    def _taken(self, event: BatchDelivered) -> None:
        """The first batch of an epoch fills the pipe and says nothing about its rate: counting begins after it."""
        if not self._is_fetching:
            self._begin()
        self._is_fetching = not event.from_cache
        self._since.stalled_s += event.stall_s
        self._since.waits = 0  # they are in the stall

    def _begin(self) -> None:
        self._since = _Since(at=self._clocks.wall(), busy_s=self._clocks.busy(), transport=self._transport.statistics())

    def _look(self) -> Replanned | None:
        assert self._profiled is not None
        seen = self._observed()
        if seen.transfer_bytes:
            self._link_seen = self._clocks.wall()
        self._begin()
        self._rates = learn(self._profiled, self._rates, seen)
        self._situation = as_measured(self._profiled, self._rates)
        change = None
        if self._rates.is_reliable(self._profiled) and is_news(self._judged, self._rates):
            self._judged = self._rates
            change = find_better(self._situation, self._shares, done_per_s=self._rates.done_per_s)
        if change is None:
            self._probe()
            return None
        self._rates = self._rates.without_mixture()
        self._plan = change.plan
        return self._changed(_shares(change.plan), change.reason)

    def _changed(self, shares: dict[Route, float], reason: str) -> Replanned:
        before, self._shares = self._shares, shares
        if isinstance(self._mixer, BothSides):
            before = self._mixer.shares
        self._deal_by_shares()
        return Replanned(
            at_s=self.age_s,
            samples=self._mixer.assigned_samples,
            before=mixture_in_words(before, self._cuts),
            after=mixture_in_words(shares, self._cuts),
            reason=reason,
        )

    def _probe(self) -> None:
        assert self._situation is not None
        assert self._profiled is not None
        now = self._clocks.wall()
        if self._rates.is_held(self._profiled) or (now < self._next_probe and self._rates.is_settled):
            return
        silent_s = now - self._link_seen
        found = probe(self._situation, self._shares, silent_s=silent_s, is_settled=self._rates.is_settled)
        self._next_probe = now + SILENCE_S
        if found is not None:
            self._link_seen = now
            assert isinstance(self._mixer, WeightedRoutes), "a plan is followed"
            self._mixer.probe(found.route, found.rows)

    def _observed(self) -> Observed:
        since, now = self._since, self._transport.statistics()
        seconds = self._clocks.wall() - since.at
        return Observed(
            seconds=seconds,
            # A stall may have begun before the last look.
            stalled_s=min(since.stalled_s + since.waits, seconds),
            rows=dict(since.rows),
            transfer_bytes=now.transfer_bytes - since.transport.transfer_bytes,
            transfer_s=now.transfer_s - since.transport.transfer_s,
            busy_s=(self._clocks.busy() - since.busy_s) / self._cores,
            allowed_bytes_per_s=self._allowed_bytes_per_s(),
        )

    def _by_shares(self) -> WeightedRoutes:
        return WeightedRoutes(
            self._shares, samples_per_request=self._samples_per_request, bytes_per_sample=self._bytes_per_sample
        )

    def _deal_by_shares(self) -> None:
        if isinstance(self._mixer, WeightedRoutes):
            self._mixer.change(self._shares)
        else:
            self._mixer = self._by_shares()

    def _bytes_per_sample(self, route: Route) -> int:
        """What one row takes at most, on its way and at its end."""
        return max(self._cuts[route.cut].bytes_per_sample, self._cuts[-1].bytes_per_sample)


class PlanFollower:
    """Tells the events of a job on, and looks with each whether its plan and engine still fit what is measured.

    Args:
        tell: function that is told of each event, and of what it changes.
        router: router of the job.
        measured: function that gives what changes because of measurements beside the loop; None where nothing is
            measured there.
        usage: observer that measures how busy each part is; it sees where passes begin and end, and a batch now and
            then.
    """

    def __init__(
        self, tell: Observer, router: Router, measured: Callable[[Event], list[Event]] | None, usage: Observer
    ) -> None:
        self._tell = tell
        self._usage = usage
        self._router = router
        self._measured = measured
        self._measured_s = time.monotonic()

    def __call__(self, event: Event) -> None:
        """Take an event. For the loop's thread."""
        self._tell(event)
        if isinstance(event, (EpochStarted, EpochFinished)) or self._is_due(event):
            self._usage(event)
        replanned = self._router.on_event(event)
        measured = [] if self._measured is None else self._measured(event)
        for change in ([] if replanned is None else [replanned]) + measured:
            self._tell(change)

    def _is_due(self, event: Event) -> bool:
        if not isinstance(event, BatchDelivered) or time.monotonic() - self._measured_s < _MEASURE_S:
            return False
        self._measured_s = time.monotonic()
        return True


@dataclass(slots=True, kw_only=True, eq=False)
class _Since:
    """What was counted since the last look."""

    at: float
    busy_s: float = 0.0
    stalled_s: float = 0.0
    waits: int = 0
    rows: Counter[Route] = field(default_factory=Counter)
    transport: TransportStatistics = field(default_factory=TransportStatistics)


def _shares(plan: Plan) -> dict[Route, float]:
    return {part.route: part.share for part in plan.mixture}
