"""Keeps rows that came within a budget, and shares the bytes under way fairly between jobs."""

import math
import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from cachetools import LRUCache

from frostline.core import FeatureBatch, Skipped
from frostline.core.nouns import finite_rows
from frostline.wire.messages import FeatureRequest
from frostline.wire.shared_memory import row_bytes

__all__ = (
    "ByteLimiter",
    "InFlightBudget",
    "JobBytes",
    "Key",
    "Row",
    "RowCache",
    "RowCacheStatistics",
    "RowFetch",
)


Key = bytes
"""Names a row: what its numbers depend on, and the version of its sample."""

# What a row takes in the index beside its bytes, rounded up: a key, an entry and a ``Row``.
_ROW_BYTES = 512


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Row:
    """A row that came.

    Attributes:
        batch: batch that it came in, which keeps its bytes.
        place: the place in the batch.
        skipped: the reason why it has none there; None where it has.
    """

    batch: FeatureBatch
    place: int
    skipped: Skipped | None = None


def _finite(batch: FeatureBatch) -> npt.NDArray[np.bool_]:
    """Which rows hold no Inf and no NaN, also as they are packed."""
    packed = [tensor.body for tensor in batch.packed if tensor.bounds is None]
    return finite_rows((*batch.tensors, *packed), len(batch))


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCacheStatistics:
    """What the cache did so far.

    Attributes:
        rows: the rows, kept now.
        bytes: the bytes, taken by them.
        budget_bytes: the most that they may take; where ``bytes`` is near it and hits are few, raise the memory.
        hits: rows that were kept when they were asked for.
        joined: rows that were on their way for another request when they were asked for.
        misses: rows that were neither, and were read.
        evicted: rows that were evicted for others.
    """

    rows: int
    bytes: int
    budget_bytes: int
    hits: int
    joined: int
    misses: int
    evicted: int


class RowFetch:
    """Rows that one request fetches; others may wait for them. ``RowCache`` guards all of it but ``close``.

    Args:
        close: function that ends the fetching from any thread; called once nobody wants what it brings.
    """

    def __init__(self, close: Callable[[], None]) -> None:
        self.rows: dict[Key, Row] = {}
        self.has_ended = False
        self.others = 0
        self.is_orphan = False
        self.close = close


class _Shelved:
    """The rows of one batch that are kept: they come and go together."""

    def __init__(self, keys: Sequence[Key], nbytes: int) -> None:
        self.keys = keys
        self.nbytes = nbytes


class RowCache:
    """Rows by their keys. Safe for threads.

    Rows that came together share memory, so they are kept and dropped together. One that is dropped lives on where an
    answer still holds it.

    Args:
        budget_bytes: the most bytes that are kept; 0 keeps none, and rows on their way are shared all the same.
    """

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._changed = threading.Condition()
        self._kept: dict[Key, tuple[Row, _Shelved]] = {}
        self._order: OrderedDict[_Shelved, None] = OrderedDict()
        self._coming: dict[Key, RowFetch] = {}
        self._bytes = 0
        self._hits = 0
        self._joined = 0
        self._misses = 0
        self._evicted = 0

    def bound(self, budget_bytes: int) -> None:
        """Keep no more than so many bytes from now on."""
        with self._changed:
            self._budget_bytes = budget_bytes
            self._evict(0)

    def claim(self, keys: Sequence[Key | None], flight: RowFetch) -> list[Row | RowFetch | None]:
        """Find each row, or the flight that brings it; where there is None, this flight has to bring it.

        A row without a key is nobody else's. The caller counts as waiting for each other flight that is named, until
        ``leave``.
        """
        with self._changed:
            found = [self._claimed(key, flight) for key in keys]
            for other in {flight for flight in found if isinstance(flight, RowFetch)}:
                other.others += 1
            return found

    def take_rows(self, flight: RowFetch, rows: Sequence[tuple[Key | None, Row]], nbytes: int) -> None:
        """Rows of one batch came; keep finite ones as far as there is space, and hand all to whoever waits."""
        named = [(key, row) for key, row in rows if key is not None]
        batch = next((row.batch for _, row in named), None)
        finite = () if batch is None else _finite(batch)
        with self._changed:
            flight.rows.update(named)
            whole = [(key, row) for key, row in named if row.skipped is None and finite[row.place]]
            size = nbytes + len(whole) * _ROW_BYTES
            if whole and size <= self._budget_bytes:
                self._keep(whole, size)
            for key, _ in named:
                self._forget(key, flight)
            self._changed.notify_all()

    def wait(self, flight: RowFetch, key: Key, is_over: Callable[[], bool]) -> Row | None:
        """A row that a flight brings; None where it ended without it, or where ``is_over`` says so."""
        with self._changed:
            self._changed.wait_for(lambda: key in flight.rows or flight.has_ended or is_over())
            return flight.rows.get(key)

    def wake(self) -> None:
        """Have those who wait look again whether it is over."""
        with self._changed:
            self._changed.notify_all()

    def leave(self, flights: Iterable[RowFetch]) -> None:
        """Wait for these no more; what nobody wants is ended."""
        with self._changed:
            for flight in (flights := list(flights)):
                flight.others -= 1
            unwanted = [flight for flight in flights if flight.is_orphan and not flight.others and not flight.has_ended]
        for flight in unwanted:
            flight.close()

    def orphan(self, flight: RowFetch) -> bool:
        """Whoever made the flight is gone; whether others still want what it brings. ``leave`` ends it otherwise."""
        with self._changed:
            flight.is_orphan = True
            return flight.others > 0

    def end(self, flight: RowFetch, keys: Iterable[Key | None]) -> None:
        """A flight brings no more: whoever waits for these of its rows fetches them."""
        with self._changed:
            flight.has_ended = True
            for key in keys:
                if key is not None:
                    self._forget(key, flight)
            self._changed.notify_all()

    def statistics(self) -> RowCacheStatistics:
        """What it did so far."""
        with self._changed:
            return RowCacheStatistics(
                rows=len(self._kept),
                bytes=self._bytes,
                budget_bytes=self._budget_bytes,
                hits=self._hits,
                joined=self._joined,
                misses=self._misses,
                evicted=self._evicted,
            )

    def _claimed(self, key: Key | None, flight: RowFetch) -> Row | RowFetch | None:
        kept = None if key is None else self._kept.get(key)
        if kept is not None:
            row, shelved = kept
            self._order.move_to_end(shelved)
            self._hits += 1
            return row
        other = None if key is None else self._coming.get(key)
        if other is not None and other is not flight:
            self._joined += 1
            return other
        self._misses += 1
        if key is not None:
            self._coming[key] = flight
        return None

    def _forget(self, key: Key, flight: RowFetch) -> None:
        if self._coming.get(key) is flight:
            del self._coming[key]

    def _keep(self, rows: Sequence[tuple[Key, Row]], size: int) -> None:
        self._evict(size)
        shelved = _Shelved([key for key, _ in rows], size)
        self._order[shelved] = None
        self._bytes += size
        self._kept.update((key, (row, shelved)) for key, row in rows)

    def _evict(self, size: int) -> None:
        while self._bytes + size > self._budget_bytes:
            oldest, _ = self._order.popitem(last=False)
            self._bytes -= oldest.nbytes
            for key in oldest.keys:
                if key in self._kept and self._kept[key][1] is oldest:
                    del self._kept[key]
                    self._evicted += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class JobBytes:
    """What a job has under way.

    Attributes:
        expected_bytes: bytes still to come for requests that were let go ahead.
        lent_bytes: number of bytes in blocks that it has and has not given back.
        waiting: requests that wait for the budget.
    """

    expected_bytes: int
    lent_bytes: int
    waiting: int


@dataclass(slots=True, kw_only=True)
class _Ticket:
    job: str
    expected_bytes: int
    is_granted: bool = False


class InFlightBudget:
    """Bytes under way: those that were asked for and have not come, and those that a job was lent. Not for threads.

    The next request is the oldest of the job with the fewest bytes, and goes ahead where it fits. So a job
    alone has all of it, several that want more than there is come to have the same, and whoever wants less has what it
    wants: shares are max-min fair. A large request at the front is not passed by smaller ones of other jobs.

    A job with no request under way may always make one, whatever it was lent: it may hold rows that it can use only
    once that one has come. So the bound is ``total_bytes`` and one request of each job.
    """

    def __init__(self, total_bytes: int) -> None:
        self._total_bytes = total_bytes
        self._max_requests = math.inf
        self._tickets: dict[int, _Ticket] = {}
        self._next = 0
        self._waiting: defaultdict[str, deque[int]] = defaultdict(deque)
        self._under_way: defaultdict[str, int] = defaultdict(int)
        self._expected: defaultdict[str, int] = defaultdict(int)
        self._lent: defaultdict[str, int] = defaultdict(int)
        self.peak_bytes = 0

    @property
    def used_bytes(self) -> int:
        """Bytes under way, of all jobs together."""
        return sum(self._expected.values()) + sum(self._lent.values())

    def bound(self, total_bytes: int, max_requests: float) -> None:
        """Let no more bytes and requests be under way from now on, beside one request of each job."""
        self._total_bytes, self._max_requests = total_bytes, max_requests

    def ask(self, job: str, nbytes: int) -> int:
        """A job wants to make a request; ``granted`` says when it may, and ``end`` follows in any case."""
        self._next += 1
        self._tickets[self._next] = _Ticket(job=job, expected_bytes=nbytes)
        self._waiting[job].append(self._next)
        return self._next

    def take_granted(self) -> list[int]:
        """The requests that may be made now and could not before."""
        found = list(self._grants())
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return found

    def lend(self, ticket: int, nbytes: int) -> None:
        """A block of so many bytes came of what was expected, and the job has it from now on."""
        one = self._tickets[ticket]
        self._lent[one.job] += nbytes
        self._expect(one, max(0, one.expected_bytes - nbytes))
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    def give_back(self, job: str, nbytes: int) -> None:
        """A job has done with blocks of so many bytes."""
        self._lent[job] -= nbytes
        assert self._lent[job] >= 0, f"{job!r} was not lent so much"
        self._tidy(job)

    def end(self, ticket: int) -> None:
        """A request is over, or is not wanted any more."""
        one = self._tickets.pop(ticket)
        if one.is_granted:
            self._expect(one, 0)
            self._under_way[one.job] -= 1
        else:
            self._waiting[one.job].remove(ticket)
        self._tidy(one.job)

    def jobs(self) -> dict[str, JobBytes]:
        """What each job has under way; jobs with nothing are not named."""
        return {
            job: JobBytes(
                expected_bytes=self._expected.get(job, 0),
                lent_bytes=self._lent.get(job, 0),
                waiting=len(self._waiting.get(job, ())),
            )
            for job in {**self._expected, **self._lent, **self._waiting}
        }

    def _grants(self) -> Iterator[int]:
        for job in [job for job, waiting in self._waiting.items() if waiting and not self._under_way[job]]:
            yield self._grant(job)
        while hungry := [job for job, waiting in self._waiting.items() if waiting]:
            job = min(hungry, key=self._used)
            wanted = self._tickets[self._waiting[job][0]].expected_bytes
            is_many = sum(self._under_way.values()) >= self._max_requests
            if is_many or self.used_bytes + wanted > self._total_bytes:
                return
            yield self._grant(job)

    def _grant(self, job: str) -> int:
        ticket = self._waiting[job].popleft()
        one = self._tickets[ticket]
        one.is_granted = True
        self._under_way[job] += 1
        self._expected[job] += one.expected_bytes
        return ticket

    def _used(self, job: str) -> int:
        return self._expected.get(job, 0) + self._lent.get(job, 0)

    def _expect(self, ticket: _Ticket, nbytes: int) -> None:
        self._expected[ticket.job] += nbytes - ticket.expected_bytes
        ticket.expected_bytes = nbytes

    def _tidy(self, job: str) -> None:
        """Forget a job that has nothing: there may be many in the life of a service."""
        if self._used(job) or self._waiting.get(job) or self._under_way.get(job):
            return
        for table in (self._waiting, self._under_way, self._expected, self._lent):
            table.pop(job, None)


_MAX_KNOWN = 1024


class ByteLimiter:
    """Bytes under way, all jobs together. Safe for threads.

    Args:
        total_bytes: the bound; see ``InFlightBudget``.
    """

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self._budget = InFlightBudget(total_bytes)
        self._changed = threading.Condition()
        self._granted: set[int] = set()
        self._row_bytes: LRUCache[bytes, float] = LRUCache(_MAX_KNOWN)

    def bound(self, total_bytes: int, max_requests: int) -> None:
        """Let no more bytes and requests be under way from now on, beside one request of each job."""
        with self._changed:
            self.total_bytes = total_bytes
            self._budget.bound(total_bytes, max_requests)
            self._grant()

    @contextmanager
    def reserve(self, job: str, request: FeatureRequest, scope: bytes, is_over: Callable[[], bool]) -> Iterator[int]:
        """Wait until an answer fits, unless it is over; yields the ticket under which its blocks are lent."""
        with self._changed:
            ticket = self._budget.ask(job, self._expected(request, scope))
            self._grant()
        try:
            with self._changed:
                self._changed.wait_for(lambda: ticket in self._granted or is_over())
            yield ticket
        finally:
            with self._changed:
                self._granted.discard(ticket)
                self._budget.end(ticket)
                self._grant()

    def lend(self, ticket: int, nbytes: int) -> None:
        """A job gets a block of so many bytes."""
        with self._changed:
            self._budget.lend(ticket, nbytes)

    def give_back(self, job: str, nbytes: int) -> None:
        """A job has done with so many bytes."""
        with self._changed:
            self._budget.give_back(job, nbytes)
            self._grant()

    def learn(self, scope: bytes, batch: FeatureBatch) -> None:
        """Remember what rows of a scope take, for the next request."""
        if not len(batch):
            return
        with self._changed:
            self._row_bytes[scope] = row_bytes(batch)

    def wake(self) -> None:
        """Have those who wait look again whether it is over."""
        with self._changed:
            self._changed.notify_all()

    def jobs(self) -> dict[str, JobBytes]:
        """What each job has under way."""
        with self._changed:
            return self._budget.jobs()

    @property
    def used_bytes(self) -> int:
        """Bytes under way now."""
        with self._changed:
            return self._budget.used_bytes

    @property
    def peak_bytes(self) -> int:
        """The most that ever was."""
        with self._changed:
            return self._budget.peak_bytes

    def _grant(self) -> None:
        granted = self._budget.take_granted()
        if granted:
            self._granted.update(granted)
            self._changed.notify_all()

    def _expected(self, request: FeatureRequest, scope: bytes) -> int:
        """What an answer takes: known at cut 0, as of the last batch else, and to begin with as if it were cut 0."""
        if request.cut == 0 or scope not in self._row_bytes:
            return request.samples.encoded_bytes
        return round(self._row_bytes[scope] * len(request.samples))
