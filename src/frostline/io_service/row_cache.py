"""Keeps rows that came, least recently used out first, and knows which are on their way, so that none is read twice."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from frostline.core import FeatureBatch, Skipped

__all__ = ("Key", "Row", "RowCache", "RowCacheStatistics", "RowFetch")

Key = bytes
"""Names a row: what its numbers depend on, and the version of its sample."""

# What a row takes in the index beside its bytes, rounded up: a key, an entry and a ``Row``.
_ROW_BYTES = 512


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Row:
    """A row that came.

    Attributes:
        batch: batch that it came in, which keeps its bytes.
        place: in the batch.
        skipped: why it has none there; None where it has.
    """

    batch: FeatureBatch
    place: int
    skipped: Skipped | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCacheStatistics:
    """What the cache did so far.

    Attributes:
        rows: kept now.
        bytes: taken by them.
        budget_bytes: the most that they may take; where ``bytes`` is near it and hits are few, raise the memory.
        hits: rows that were kept when they were asked for.
        joined: rows that were on their way for another request when they were asked for.
        misses: rows that were neither, and were read.
        evicted: rows that made room for others.
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
        close: ends the fetching from any thread; called once nobody wants what it brings.
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
        budget_bytes: most bytes that are kept; 0 keeps none, and rows on their way are shared all the same.
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
            self._make_room(0)

    def claim(self, keys: Sequence[Key | None], flight: RowFetch) -> list[Row | RowFetch | None]:
        """For each row: itself, or the flight that brings it, or None: then it is this flight that has to.

        A row without a key is nobody else's. The caller counts as waiting for each other flight that is named, until
        ``leave``.
        """
        with self._changed:
            found = [self._claimed(key, flight) for key in keys]
            for other in {flight for flight in found if isinstance(flight, RowFetch)}:
                other.others += 1
            return found

    def arrived(self, flight: RowFetch, rows: Sequence[tuple[Key | None, Row]], nbytes: int) -> None:
        """Rows of one batch came; keep them as far as there is room, and hand them to whoever waits."""
        named = [(key, row) for key, row in rows if key is not None]
        with self._changed:
            flight.rows.update(named)
            whole = [(key, row) for key, row in named if row.skipped is None]
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
        self._make_room(size)
        shelved = _Shelved([key for key, _ in rows], size)
        self._order[shelved] = None
        self._bytes += size
        self._kept.update((key, (row, shelved)) for key, row in rows)

    def _make_room(self, size: int) -> None:
        while self._bytes + size > self._budget_bytes:
            oldest, _ = self._order.popitem(last=False)
            self._bytes -= oldest.nbytes
            for key in oldest.keys:
                if key in self._kept and self._kept[key][1] is oldest:
                    del self._kept[key]
                    self._evicted += 1
