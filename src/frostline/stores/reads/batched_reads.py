"""Reads many places of a store at once, and neighbouring ones of an object together."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import islice
from typing import NamedTuple

from frostline.errors import ObjectNotFound, StoreError
from frostline.stores.base.protocols import Buffer, Place, Versioned
from frostline.stores.base.urls import check_name
from frostline.stores.reads.coalesce import Range, plan_ranges

__all__ = ("BatchedReads",)

Found = tuple[Buffer, str] | StoreError


class _Read(NamedTuple):
    object: str
    whole: Range
    rows: list[int]


class BatchedReads:
    """``Batched`` for any store, by threads. What lies near each other in an object is read by one request.

    What is given views the whole of what was read with it, and keeps it alive. Safe for threads where the store is.

    Args:
        store: store that is read.
        max_gap_bytes: read in vain rather than make another request.
        max_bytes: maximum bytes of one request, unless a place is larger by itself.
    """

    def __init__(self, store: Versioned, *, max_gap_bytes: int = 64 << 10, max_bytes: int = 4 << 20) -> None:
        self._store = store
        self._max_gap_bytes = max_gap_bytes
        self._max_bytes = max_bytes

    def read_many(self, places: Sequence[Place], *, maximum: int = 32) -> Iterator[tuple[int, Found]]:
        """See ``Batched.read_many``; ``maximum`` counts requests."""
        rest = iter(self._reads(places))
        with ThreadPoolExecutor(maximum, "frostline-joined") as threads:
            under_way: set[Future[list[tuple[int, Found]]]] = set()
            try:
                while True:
                    started = islice(rest, maximum - len(under_way))
                    under_way |= {threads.submit(self._read, request, places) for request in started}
                    if not under_way:
                        return
                    done, under_way = wait(under_way, return_when=FIRST_COMPLETED)
                    for read in done:
                        yield from read.result()
            finally:
                for read in under_way:
                    read.cancel()

    def _reads(self, places: Sequence[Place]) -> list[_Read]:
        rows_of: defaultdict[str, list[int]] = defaultdict(list)
        for row, place in enumerate(places):
            rows_of[check_name(place.object)].append(row)
        return [read for object, rows in rows_of.items() for read in self._reads_of(object, rows, places)]

    def _reads_of(self, object: str, rows: list[int], places: Sequence[Place]) -> list[_Read]:
        asked = [Range(places[row].offset, places[row].length) for row in rows]
        plan = plan_ranges(asked, max_gap_bytes=self._max_gap_bytes, max_bytes=self._max_bytes)
        reads = [_Read(object, whole, []) for whole in plan.reads] or [_Read(object, Range(0, 0), [])]
        for row, piece in zip(rows, plan.pieces, strict=True):
            reads[piece.read].rows.append(row)
        return reads

    def _read(self, read: _Read, places: Sequence[Place]) -> list[tuple[int, Found]]:
        try:
            data, version = self._store.read_version(read.object, *read.whole)
        except ObjectNotFound as error:
            # Where the object ended early, those before that end are still to be had.
            return (
                [(read.rows[0], error)]
                if len(read.rows) == 1
                else [(row, self._alone(places[row])) for row in read.rows]
            )
        return [(row, (_cut(data, read.whole, places[row]), version)) for row in read.rows]

    def _alone(self, place: Place) -> Found:
        try:
            return self._store.read_version(place.object, place.offset, place.length)
        except ObjectNotFound as error:
            return error


def _cut(data: Buffer, whole: Range, place: Place) -> Buffer:
    start = place.offset - whole.offset
    return memoryview(data)[start : start + place.length] if place.length else b""
