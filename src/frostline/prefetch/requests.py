"""Decides which samples are asked for together, and turns rows that come in runs into batches of an exact size."""

import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from frostline.core import FeatureBatch, Route, Samples, SampleTable
from frostline.core.errors import SettingError

__all__ = (
    "Ask",
    "BatchAssembler",
    "Column",
    "Columns",
    "Delivery",
    "Gathered",
    "Memory",
    "NextRequest",
    "PlannedRequest",
    "RequestSource",
    "RowRange",
    "ShortestWait",
    "Slabs",
    "WeightedRoutes",
    "plan_requests",
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlannedRequest:
    """Samples to ask for in one request.

    Attributes:
        positions: ``int64[n]``, places in the epoch, ascending; a gap is a sample that needs no asking.
        samples: the samples at those places.
        expected_bytes: payload that the answer should have. The window's bound is as good as this figure.
        route: the way that they take.
        epoch: epoch that they belong to, where a window asks for several: nothing of one is handed out before the last
            of the one before it.
        nodes: names of the nodes to ask, the owner of the samples first; none where any will do.
        row_s: see ``NextRequest``.
    """

    positions: npt.NDArray[np.int64]
    samples: Samples
    expected_bytes: int
    route: Route
    epoch: int = 0
    nodes: tuple[str, ...] = ()
    row_s: float | None = None

    def __post_init__(self) -> None:
        if len(self.positions) == 0 or len(self.positions) != len(self.samples):
            raise ValueError(f"a request has {len(self.positions)} positions for {len(self.samples)} samples")

    def __len__(self) -> int:
        return len(self.positions)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ask:
    """One request to make now.

    Attributes:
        number: number of this attempt; an answer to an older attempt is not taken.
        attempt: 1, or more after failures and for a second request.
        samples: samples to ask for, in order; the request without those that arrived in earlier attempts.
        route: the way that they take; the same in every attempt.
        is_hedge: True if an earlier attempt is under way and late.
        epoch: epoch of the request.
        nodes: names of the nodes to ask, in order; every other attempt begins with the second.
    """

    number: int
    attempt: int
    samples: Samples
    route: Route
    is_hedge: bool
    epoch: int = 0
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Delivery:
    """Rows handed out together.

    Attributes:
        positions: ``int64[len(batch)]``, places in the epoch of the batch's rows, ascending.
        stop: every asked-for sample at a place below this has now been handed out or skipped; with ``max_reorder=0`` no
            other one has.
        reach: samples at places below this that need no asking may be handed out too; ``stop`` with ``max_reorder=0``.
        batch: the rows, and the samples skipped among them.
    """

    positions: npt.NDArray[np.int64]
    stop: int
    reach: int
    batch: FeatureBatch

    def span(self, *, before: int) -> tuple[int, int]:
        """The places from its first row to its last one that lie before a place; none where no row does."""
        first, stop = (int(self.positions[0]), int(self.positions[-1]) + 1) if len(self.positions) else (before, before)
        return min(first, before), min(stop, before)


@dataclass(frozen=True, slots=True, kw_only=True)
class NextRequest:
    """What the next request is.

    Attributes:
        route: the way that its samples take.
        rows: samples in it.
        bytes_per_sample: payload of one sample; 0 where the encoded sample itself travels.
        row_s: seconds that this side's processor is believed to take for a row, until it has run some; None where
            nobody knows, or it has nothing to do.
    """

    route: Route
    rows: int
    bytes_per_sample: int
    row_s: float | None = None

    def make_request(self, positions: npt.NDArray[np.int64], samples: Samples) -> PlannedRequest:
        """The request for the samples at these places in the epoch."""
        expected_bytes = self.bytes_per_sample * len(samples) if self.bytes_per_sample else samples.encoded_bytes
        return PlannedRequest(
            positions=positions, samples=samples, expected_bytes=expected_bytes, route=self.route, row_s=self.row_s
        )


class RequestSource(Protocol):
    """Says which way the next samples take. It is asked when the window has capacity, and not before."""

    def next_request(self, left: int, again: Route | None = None) -> NextRequest:
        """The next request, of one sample to ``left``; whoever asks makes it.

        Args:
            left: number of samples that are not dealt yet.
            again: the way of ``left`` samples that were dealt as one request, which nobody made: it is dealt anew.
        """


def plan_requests(
    table: SampleTable, rows: npt.NDArray[np.int64], positions: npt.NDArray[np.int64], request_source: RequestSource
) -> Iterator[PlannedRequest]:
    """Divide what an epoch must ask for into requests. Lazy: a request is made when the window has capacity for it.

    Args:
        table: the data set.
        rows: ``int64[n]``, rows of the table to ask for; leave out what the cache holds.
        positions: ``int64[n]``, the place in the epoch of each of them, ascending.
        request_source: source that chooses each request's length and way.
    """
    start = 0
    while start < len(positions):
        following = request_source.next_request(len(positions) - start)
        chosen = positions[start : start + following.rows]
        samples = table.take(rows[start : start + following.rows])
        start += len(chosen)
        yield following.make_request(chosen, samples)


def deal_again(request: PlannedRequest, request_source: RequestSource) -> PlannedRequest:
    """The same samples on the way that is best now, where nobody has asked for them yet."""
    following = request_source.next_request(len(request), request.route)
    return replace(following.make_request(request.positions, request.samples), epoch=request.epoch, nodes=request.nodes)


class WeightedRoutes:
    """Deals requests over a mixture of ways. Not for several threads.

    Each way is owed its share of every sample dealt; the next request goes where most is owed. After any number of
    samples a way is within one request of its share, and which way a sample took depends on nothing but the mixture
    and the samples before it.

    Args:
        shares: shares of the samples, by way; they sum to one.
        samples_per_request: the most samples in one request.
        bytes_per_sample: payload of a sample that takes a way; 0 where the encoded sample itself travels.
    """

    def __init__(
        self, shares: Mapping[Route, float], *, samples_per_request: int, bytes_per_sample: Callable[[Route], int]
    ) -> None:
        self._samples_per_request = samples_per_request
        self._bytes_per_sample = bytes_per_sample
        self._assigned = 0
        self._probe: tuple[Route, int] | None = None
        self.change(shares)

    @property
    def assigned_samples(self) -> int:
        """Samples dealt so far, in all mixtures."""
        return self._assigned

    def change(self, shares: Mapping[Route, float]) -> None:
        """Deal by another mixture from now on; what was dealt stays."""
        assert abs(sum(shares.values()) - 1) < 1e-6, "the shares of a mixture sum to one"
        self._shares = {route: share for route, share in shares.items() if share > 0}
        self._owed = dict.fromkeys(self._shares, 0.0)

    def probe(self, route: Route, rows: int) -> None:
        """Let the next request be this one, whatever the shares: its samples are wanted anyway."""
        self._probe = (route, rows)

    def next_request(self, left: int, again: Route | None = None) -> NextRequest:
        """See ``RequestSource``; what was dealt keeps its way."""
        if again is not None:
            return NextRequest(route=again, rows=left, bytes_per_sample=self._bytes_per_sample(again))
        route, rows = self._probe or (self._max_owed(left), self._samples_per_request)
        rows = min(rows, left)
        self._assigned += rows
        if self._probe is None:
            for way, share in self._shares.items():
                self._owed[way] += share * rows
            self._owed[route] -= rows
        self._probe = None
        return NextRequest(route=route, rows=rows, bytes_per_sample=self._bytes_per_sample(route))

    def _max_owed(self, left: int) -> Route:
        rows = min(self._samples_per_request, left)
        return max(self._shares, key=lambda route: self._owed[route] + self._shares[route] * rows)


# A rate is what a way did with its last rows, and says something from so few on.
_REMEMBERED_ROWS, _TELLING_ROWS = 128, 4
# A way that had nothing to do is believed to be faster by as much again after so long, until it is tried.
_FORGOTTEN_S = 5.0
# Rows of a request while not all ways are open, and of the first one to a way that is believed to be slow.
_FEW, _FIRST = 8, 4
# For so long after a way was closed a request takes so long of a link: what opens the way crosses it behind these.
_OPENING_S, _SHORT_S = 5.0, 0.2
# Seconds of work that may wait for a way that something bounds.
_QUEUE_S = 1.5
# Rows of which nothing was heard for so long were abandoned.
_LOST_S = 60.0


@dataclass(slots=True, kw_only=True)
class _Way:
    """What is known of a way.

    Attributes:
        prior: rows a second that were believed at first.
        waiting: rows that were asked for there and are not done.
        rows: rows done, of which the oldest fade.
        busy_s: seconds in which these were.
        since: the time until which its time is counted.
        bounded_until: the time when it will have done what was dealt to it, at the most that its bound allows.
    """

    prior: float
    waiting: int = 0
    rows: float = 0.0
    busy_s: float = 0.0
    since: float = 0.0
    bounded_until: float = 0.0

    @property
    def observed(self) -> float | None:
        """Rows a second while it had something to do; None where too few were done."""
        return self.rows / self.busy_s if self.rows >= _TELLING_ROWS and self.busy_s > 0 else None


class ShortestWait:
    """Deals each request to the way on which it is expected to be done first. Not for several threads.

    What was asked of a way and is not done comes before the next request there, at the rate that the way had while it
    had something to do. So no way is idle that would be done with a request sooner than the others ("join the shortest
    expected delay", Banawan and Zahorjan, 1989), and nothing is computed to be measured. Before a way has done anything
    its prior counts, in proportion to what the others turned out to do; one that would get nothing by that gets a few
    samples all the same, for a prior may be wrong by any factor.

    Args:
        priors: rates that are believed before anything was done, by way; their proportions count alone.
        samples_per_request: the most samples in one request.
        bytes_per_sample: payload of a sample that takes a way; 0 where the encoded sample itself travels.
        clock: seconds of a monotonic clock.
        bound: the most rows a second that a way may be believed to have; infinity where nothing bounds it.
        rows_per_run: rows that each run of a way computes, however few a request has; 1 where that is not said.
        row_s: seconds that this side's processor is believed to take for a row of a way; see ``NextRequest``.
    """

    def __init__(
        self,
        priors: Mapping[Route, float],
        *,
        samples_per_request: int,
        bytes_per_sample: Callable[[Route], int],
        clock: Callable[[], float],
        bound: Callable[[Route], float] = lambda _: math.inf,
        rows_per_run: Mapping[Route, int] | None = None,
        row_s: Mapping[Route, float] | None = None,
    ) -> None:
        assert min(priors.values()) > 0, "every way may be taken"
        self._ways = {route: _Way(prior=prior, since=clock()) for route, prior in priors.items()}
        self._samples_per_request = samples_per_request
        self._bytes_per_sample = bytes_per_sample
        self._clock = clock
        self._bound = bound
        self._rows_per_run = dict(rows_per_run or {})
        self._row_s = dict(row_s or {})
        self._assigned: Counter[Route] = Counter()
        self._are_bound: dict[Route, bool] = {}
        self._closed: dict[Route, float] = {}
        self._max_waiting: dict[Route, int] = {}
        self._spared: Route | None = None

    @property
    def assigned_samples(self) -> int:
        """Samples dealt so far."""
        return self._assigned.total()

    @property
    def samples_per_s(self) -> float:
        """Samples a second by all ways together, as far as is known."""
        return sum(min(way.observed or 0.0, self._bound(route)) for route, way in self._ways.items())

    def observed_speed(self, route: Route) -> float:
        """Rows a second of a way while it had something to do; 0 as long as it did nothing."""
        return self._ways[route].observed or 0.0

    @property
    def is_bound(self) -> bool:
        """Whether a way could do more than its bound allowed when a request was dealt last."""
        return any(self._are_bound.values())

    @property
    def shares(self) -> dict[Route, float]:
        """Shares of the samples dealt so far; of what is believed, before any was."""
        counts = self._assigned if self._assigned else Counter({route: way.prior for route, way in self._ways.items()})
        whole = sum(counts.values())
        return {route: count / whole for route, count in counts.items()}

    def takes(self, routes: Iterable[Route]) -> bool:
        """Whether it deals to all of these ways."""
        return all(route in self._ways for route in routes)

    @property
    def has_choice(self) -> bool:
        """Whether samples that are not dealt yet may take more than one way, now or when one that is closed opens."""
        return len(self._ways) - len(self._closed) > 1 or any(map(math.isfinite, self._closed.values()))

    def close(self, route: Route, *, is_expected: bool = True) -> None:
        """Deal nothing to a way from now on, as to a node that is not ready, and say whether it is expected to open."""
        assert len(self._closed.keys() | {route}) < len(self._ways), "one way is left"
        self._closed[route] = self._clock() if is_expected else -math.inf

    def open(self, route: Route, *, max_waiting: int | None = None) -> None:
        """Deal to a way from now on.

        Args:
            route: the way.
            max_waiting: rows from which on nothing is added to those that wait for it, as for a node that is to do
                something else soon; None bounds them no more.
        """
        self._closed.pop(route, None)
        self._max_waiting.pop(route, None)
        if max_waiting is not None:
            self._max_waiting[route] = max_waiting

    def spare(self, route: Route | None) -> None:
        """Deal to a way only where no other is open, as to a processor that has other work; None spares none."""
        self._spared = route

    def begin_again(self, route: Route, samples_per_s: float | None = None) -> None:
        """Forget how fast a way was: something else computes there from now on.

        Args:
            route: the way.
            samples_per_s: speed that this is believed to have until it has done something; None where nobody knows.
        """
        way = self._ways.get(route)
        if way is not None:
            rows = _TELLING_ROWS if samples_per_s else 0
            way.rows, way.busy_s, way.since = rows, rows / (samples_per_s or 1.0), self._clock()

    def next_request(self, left: int, again: Route | None = None) -> NextRequest:
        """See ``RequestSource``."""
        now = self._clock()
        if again is None:
            route, rows = self._first_done(left, now)
        else:
            self._take_back(again, left, now)
            route, rows = self._way_of_all(left, now), left
        way = self._ways[route]
        if not way.waiting:
            way.since = now
        way.waiting += rows
        way.bounded_until = max(now, way.bounded_until) + rows / self._bound(route)
        self._assigned[route] += rows
        payload, row_s = self._bytes_per_sample(route), self._row_s.get(route)
        return NextRequest(route=route, rows=rows, bytes_per_sample=payload, row_s=row_s)

    def _first_done(self, left: int, now: float) -> tuple[Route, int]:
        """The way on which the next request is expected to be done first, and its rows."""
        # What waits for one way while another is closed cannot be dealt to that when it opens.
        is_short = self._closed or self._max_waiting
        maximum = min(_FEW, self._samples_per_request) if is_short else self._samples_per_request
        rows = min(maximum, left, self._guided_rows(left))
        ways, route = self._first_of(left, rows, now)
        if self._ways[route].waiting:
            route, rows = self._idle_way(route, ways, rows, now)
        rows = max(self._rows_per_run.get(route, 1), self._soon_across(route, rows, now))
        rows = min(rows, self._samples_per_request, left)
        # Where runs are long, one that is filled up costs more than the link's wait.
        if rows <= _FEW and any(now - closed_at < _OPENING_S for closed_at in self._closed.values()):
            rows = max(1, int(min(self._bound(route) * _SHORT_S, rows)))
        return route, rows

    def _guided_rows(self, left: int) -> int:
        """Rows of a request, fewer of the last ones, so that all ways end together.

        That is half of what each way has of the rest, in whole runs ("guided self-scheduling", Polychronopoulos and
        Kuck, 1987).
        """
        run = max(self._rows_per_run.values(), default=self._samples_per_request)
        return run * -(-left // (2 * len(self._ways) * run))

    def _way_of_all(self, rows: int, now: float) -> Route:
        """The way on which all these rows are expected to be done first."""
        ways, route = self._first_of(rows, rows, now)
        if self._ways[route].waiting:
            idle, few = self._idle_way(route, ways, rows, now)
            route = idle if few == rows or not self._ways[idle].rows else route
        return route

    def _first_of(self, left: int, rows: int, now: float) -> tuple[list[Route], Route]:
        """The open ways, and that of them on which so many rows are expected to be done first."""
        ways = self._open_ways(left, rows, now)
        return ways, min(ways, key=lambda route: self._wait_s(route, rows, now))

    def _take_back(self, route: Route, rows: int, now: float) -> None:
        way = self._ways.get(route)
        if way is not None:
            way.waiting = max(0, way.waiting - rows)
            way.bounded_until = max(now, way.bounded_until - rows / self._bound(route))
            self._assigned[route] -= rows

    def finish_rows(self, route: Route, rows: int) -> None:
        """Rows of a way are where the loop can have them."""
        way, now = self._ways.get(route), self._clock()
        if way is None:
            return
        way.rows += rows
        way.busy_s += now - way.since
        fading = min(1.0, _REMEMBERED_ROWS / way.rows) if way.rows else 1.0
        way.rows, way.busy_s = way.rows * fading, way.busy_s * fading
        way.waiting, way.since = max(0, way.waiting - rows), now

    def drop_rows(self, route: Route, rows: int) -> None:
        """Rows of a way come no more, as of a pass that was left."""
        way = self._ways.get(route)
        if way is not None:
            way.waiting = max(0, way.waiting - rows)

    def _open_ways(self, left: int, rows: int, now: float) -> list[Route]:
        """Ways to which the next request may go.

        What waits for a way that something bounds, such as a link, takes from all that crosses it: a queue there is
        kept short, until the last requests, which end together: it takes what crosses soon, or a run if nothing waits.
        """
        found = [route for route in self._ways if route not in self._closed]
        found = [route for route in found if route != self._spared] or found
        found = [
            route for route in found if self._ways[route].waiting < self._max_waiting.get(route, math.inf)
        ] or found
        if left <= max(self._ways[route].waiting for route in found):
            return found
        runs = {route: min(rows, self._rows_per_run.get(route, 1)) for route in found}
        short = [route for route, run in runs.items() if self._soon_across(route, run, now) == run]
        return [route for route in found if route in short or not self._queue_s(route, now)] or found

    def _idle_way(self, chosen: Route, ways: Sequence[Route], rows: int, now: float) -> tuple[Route, int]:
        """A way with nothing to do, and the rows that it would be done with before the chosen one; else that, and all.

        A prior may be wrong by any factor: a way that has done nothing yet gets a few samples in any case.
        """
        wait_s = self._wait_s(chosen, rows, now)
        for route in ways:
            way = self._ways[route]
            if not way.waiting and route != chosen:
                bounded_s = wait_s - max(0.0, way.bounded_until - now)
                fitting = max(0.0, min(self._rate(way) * wait_s, self._bound(route) * bounded_s, rows))
                few = max(int(fitting), 0 if way.rows else min(_FIRST, rows))
                if way.rows and few < min(self._rows_per_run.get(route, 1), rows):
                    few = 0  # as many rows are computed as a run has
                if few:
                    return route, few
        return chosen, rows

    def _wait_s(self, route: Route, rows: int, now: float) -> float:
        way = self._ways[route]
        if way.waiting and now - way.since > _LOST_S:
            way.waiting = 0
        idle_s = 0.0 if way.waiting else now - way.since
        rate, bound = self._rate(way) * (1 + idle_s / _FORGOTTEN_S), self._bound(route)
        self._are_bound[route] = bound < rate
        return max((way.waiting + rows) / rate, self._crossing_s(route, rows, now))

    def _crossing_s(self, route: Route, rows: int, now: float) -> float:
        """Until what bounds a way lets these rows through; what was dealt to it goes first."""
        return self._queue_s(route, now) + rows / self._bound(route)

    def _soon_across(self, route: Route, rows: int, now: float) -> int:
        """Those of some rows that what bounds a way lets through within the time that a queue there may take."""
        fitting = self._bound(route) * (_QUEUE_S - self._queue_s(route, now))
        return rows if fitting >= rows else int(max(0.0, fitting))

    def _queue_s(self, route: Route, now: float) -> float:
        """Until what bounds a way has let through what was dealt to it."""
        return max(0.0, self._ways[route].bounded_until - now)

    def _rate(self, way: _Way) -> float:
        if way.observed is not None:
            return way.observed
        known = [other.observed / other.prior for other in self._ways.values() if other.observed is not None]
        return way.prior * (sum(known) / len(known) if known else 1.0)


# What is smaller comes from the C library without a page fault.
_LARGE = 64 << 10
# Where a cache line begins; frameworks whose kernels ask for that take an array's memory as it is.
_ALIGNED = 64
# A loop holds a batch while the next one is made; what comes back beyond that is given to the system.
_MAX_IDLE = 2

_Bytes = npt.NDArray[np.uint8]


class Memory(Protocol):
    """Where batches lie."""

    def empty(self, shape: Sequence[int], dtype: np.dtype[np.generic]) -> npt.NDArray[np.generic]:
        """An array of the caller's own, contiguous and not written yet."""


class Slabs:
    """Arrays for batches. Safe for several threads.

    Large memory that comes fresh from the system is faulted in page by page, which takes longer than to fill it.
    So an array's memory comes back when the last reference to the array is gone, and not before: views of it, and
    tensors that were made from it, count. Whoever could still write into it or read it could do so with any memory
    that was freed. What is not in use goes when the slabs themselves do.

    Args:
        max_idle: arrays of one size that are kept while nobody refers to them.
    """

    def __init__(self, max_idle: int = _MAX_IDLE) -> None:
        self._max_idle = max_idle
        self._idle: dict[int, list[_Bytes]] = {}

    def empty(self, shape: Sequence[int], dtype: np.dtype[np.generic]) -> npt.NDArray[np.generic]:
        """An array of the caller's own, not written yet."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < _LARGE or dtype.hasobject:
            return np.empty(shape, dtype)
        try:
            whole = self._idle[nbytes].pop()
        except LookupError:
            whole = _aligned(nbytes)
        return np.asarray(_Lent(whole, self)).view(dtype).reshape(shape)

    def take_back(self, whole: _Bytes) -> None:
        """Keep memory for the next array of that size."""
        idle = self._idle.setdefault(whole.nbytes, [])
        if len(idle) < self._max_idle:
            idle.append(whole)


def _aligned(nbytes: int) -> _Bytes:
    memory = np.empty(nbytes + _ALIGNED, np.uint8)
    start = -memory.ctypes.data % _ALIGNED
    return memory[start : start + nbytes]


class _Lent:
    """Stands under every array over some memory, so that it goes when the last of them does."""

    __slots__ = ("__array_interface__", "_slabs", "_whole")

    def __init__(self, whole: _Bytes, slabs: Slabs) -> None:
        self.__array_interface__ = whole.__array_interface__
        self._whole = whole
        self._slabs = weakref.ref(slabs)

    def __del__(self) -> None:
        slabs = self._slabs()
        if slabs is not None:
            slabs.take_back(self._whole)


Columns = tuple[npt.NDArray[np.generic], ...]
_Places = slice | npt.NDArray[np.int64]
_Layout = list[tuple[tuple[int, ...], np.dtype[np.generic]]]

# From here on copying a row takes longer than naming it, so that rows are copied one by one rather than all twice.
_LARGE_ROW = 16 << 10


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Gathered:
    """Rows that lie scattered in a table; nothing is copied before their batch is filled.

    Attributes:
        table: ``[m, ...]``, contiguous; the rows that are named must stay as they are until their batch is there.
        rows: ``int64[n]``, which of them, in this order.
    """

    table: npt.NDArray[np.generic]
    rows: npt.NDArray[np.int64]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of an array of these rows."""
        return (len(self.rows), *self.table.shape[1:])

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """The type of the table's values."""
        return self.table.dtype


Column = npt.NDArray[np.generic] | Gathered


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowRange:
    """Some rows of a run of rows, from one source: the node's answer, or the cache.

    Attributes:
        places: ``int64[n]``, where the rows stand in the run, ascending; None where the part is the whole run.
        columns: arrays ``[n, ...]``, such as ids, labels and activations, or rows of tables; only read.
        is_kept: True if they come from a cache.
    """

    places: npt.NDArray[np.int64] | None = None
    columns: tuple[Column, ...]
    is_kept: bool = False

    def __len__(self) -> int:
        return self.columns[0].shape[0]


class BatchAssembler:
    """Fills batches in order. Skipped samples are never added, so they leave no hole. Not safe for several threads.

    Args:
        batch_size: rows of every batch but perhaps the last.
        drop_last: leave out a last batch with fewer rows.
        memory: the place where batches lie; None for memory of this process that is used again.

    Attributes:
        kept: rows from a cache in the batch that was given away last.
    """

    def __init__(self, *, batch_size: int, drop_last: bool, memory: Memory | None = None) -> None:
        self.kept = 0
        self._batch_size = batch_size
        self._drop_last = drop_last
        self._memory = Slabs() if memory is None else memory
        self._layout: _Layout = []
        self._slabs: Columns = ()
        self._filled = 0
        self._filled_kept = 0

    def add(self, *columns: Column) -> Iterator[Columns]:
        """Add rows from one source; see ``merge``."""
        return self.merge(RowRange(columns=columns))

    def merge(self, *parts: RowRange) -> Iterator[Columns]:
        """Add a run of rows that come from several sources, and yield each batch that they complete.

        Args:
            *parts: the places of each batch; together they name each from 0 to the number of rows once.

        Yields:
            Arrays ``[batch_size, ...]`` in the columns' order; the caller's own, never written again.

        Raises:
            ValueError: a row's shape or type differs from the rows before it.
        """
        parts = tuple(part for part in parts if len(part))
        for part in parts:
            self._fit(part.columns)
        rows = sum(map(len, parts))
        done = 0
        while done < rows:
            step = min(rows - done, self._batch_size - self._filled)
            self._copy(parts, done, step)
            done += step
            if self._filled == self._batch_size:
                yield self._give_away()

    def pending_rows(self, column: int) -> npt.NDArray[np.generic] | None:
        """One column of the rows that wait for their batch to be full, in its own memory; None where none do."""
        return self._slabs[column][: self._filled] if self._filled else None

    def finish(self, minimum: int = 0) -> Columns | None:
        """The last batch, with the rows that are left; None where none are, or ``drop_last`` leaves it out.

        Args:
            minimum: rows that it has if it has any, at most a whole batch's: its own come again, in turn.
        """
        filled = self._filled
        slabs = self._give_away()
        if not filled or self._drop_last:
            return None
        again = np.arange(minimum - filled) % filled
        for slab in slabs:
            slab[filled : filled + len(again)] = slab[again]
        return tuple(slab[: filled + len(again)] for slab in slabs)

    def _fit(self, columns: Sequence[Column]) -> None:
        """Learn the rows' layout from the first ones, and hold later ones to it."""
        given = [(column.shape[1:], column.dtype) for column in columns]
        self._layout = self._layout or given
        if given != self._layout:
            raise ValueError(f"a batch of rows like {self._layout} cannot take rows like {given}")

    def _new_slabs(self) -> tuple[npt.NDArray[np.generic], ...]:
        size = self._batch_size
        try:
            return tuple(self._memory.empty((size, *shape), dtype) for shape, dtype in self._layout)
        except MemoryError as error:
            why = f"a batch of {size} samples does not fit into memory ({error}): give a smaller batch_size"
            raise SettingError(why) from error

    def _copy(self, parts: Sequence[RowRange], start: int, rows: int) -> None:
        """Copy the run's rows from ``start`` on to where the batch is filled up to."""
        if not self._slabs:
            self._slabs = self._new_slabs()
        for part in parts:
            some, target = _within(part.places, start, rows, self._filled)
            for slab, column in zip(self._slabs, part.columns, strict=True):
                _copy(column, some, slab, target)
            self._filled_kept += (some.stop - some.start) * part.is_kept
        self._filled += rows

    def _give_away(self) -> Columns:
        slabs, self._slabs, self._filled = self._slabs, (), 0
        self.kept, self._filled_kept = self._filled_kept, 0
        return slabs


def _within(places: npt.NDArray[np.int64] | None, start: int, rows: int, filled: int) -> tuple[slice, _Places]:
    """Which of a part's rows lie within a stretch of the run, and where they go in the batch."""
    if places is None:
        return slice(start, start + rows), slice(filled, filled + rows)
    first, stop = np.searchsorted(places, (start, start + rows)).tolist()
    target = places[first:stop] - start + filled
    if len(target) and target[-1] - target[0] + 1 == len(target):  # neighbours, which are copied in one piece
        return slice(first, stop), slice(int(target[0]), int(target[-1]) + 1)
    return slice(first, stop), target


def _copy(column: Column, some: slice, slab: npt.NDArray[np.generic], target: _Places) -> None:
    if not isinstance(column, Gathered):
        slab[target] = column[some]
        return
    table, rows = column.table, column.rows[some]
    if isinstance(target, slice):
        # Any other mode than raise writes to ``out`` itself, and not to a copy first.
        table.take(rows, 0, slab[target], "clip")
    elif slab[:1].nbytes < _LARGE_ROW:
        slab[target] = table[rows]
    else:
        for place, row in zip(target.tolist(), rows.tolist(), strict=True):
            slab[place] = table[row]
