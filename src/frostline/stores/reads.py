"""Reads many places of a store at once, and neighbouring ones of an object by one request."""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, Protocol

from frostline.core.errors import ObjectNotFound, StoreError
from frostline.stores.protocols import Buffer, ByteRange, Versioned
from frostline.stores.urls import check_name

__all__ = (
    "AdjacentReads",
    "BatchedReads",
    "MemoryReservation",
    "Range",
    "RangePiece",
    "RangePlan",
    "SharedReads",
    "neighbours",
    "plan_ranges",
)


class Range(NamedTuple):
    """Bytes of one object.

    Attributes:
        offset: the place where they begin.
        length: the number of length.
    """

    offset: int
    length: int

    @property
    def stop(self) -> int:
        """Where they end."""
        return self.offset + self.length


class RangePiece(NamedTuple):
    """Where an asked range lies in what is read.

    Attributes:
        read: number of the read.
        start: place in its bytes where it begins.
        length: the length as asked.
    """

    read: int
    start: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RangePlan:
    """What to read of an object.

    Attributes:
        reads: ranges to read, by offset; none is empty.
        pieces: pieces of each asked range, in the order in which they were asked; one of no bytes is at the first read.
    """

    reads: tuple[Range, ...]
    pieces: tuple[RangePiece, ...]

    @property
    def nbytes(self) -> int:
        """How many bytes are read."""
        return sum(read.length for read in self.reads)


def plan_ranges(asked: Sequence[Range], *, max_gap_bytes: int, max_bytes: int) -> RangePlan:
    """Join ranges that are near each other.

    Args:
        asked: the ranges in any order; they may overlap or be the same.
        max_gap_bytes: bytes that nobody asked for, read in vain between two ranges rather than begin another read.
        max_bytes: maximum bytes of a joined read. A range that is larger by itself is read as it is.
    """
    reads: list[Range] = []
    pieces = [RangePiece(0, 0, 0)] * len(asked)
    for row in sorted(range(len(asked)), key=lambda row: asked[row]):
        one = asked[row]
        if not one.length:
            continue
        if not reads or not _joins(reads[-1], one, max_gap_bytes, max_bytes):
            reads.append(one)
        last = reads[-1]
        reads[-1] = last._replace(length=max(last.stop, one.stop) - last.offset)
        pieces[row] = RangePiece(len(reads) - 1, one.offset - last.offset, one.length)
    return RangePlan(reads=tuple(reads), pieces=tuple(pieces))


def _joins(last: Range, following: Range, max_gap_bytes: int, max_bytes: int) -> bool:
    if following.stop <= last.stop:
        return True
    return following.offset - last.stop <= max_gap_bytes and following.stop - last.offset <= max_bytes


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

    def read_many(self, places: Sequence[ByteRange], *, maximum: int = 32) -> Iterator[tuple[int, Found]]:
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

    def _reads(self, places: Sequence[ByteRange]) -> list[_Read]:
        rows_of: defaultdict[str, list[int]] = defaultdict(list)
        for row, place in enumerate(places):
            rows_of[check_name(place.object)].append(row)
        return [read for object, rows in rows_of.items() for read in self._reads_of(object, rows, places)]

    def _reads_of(self, object: str, rows: list[int], places: Sequence[ByteRange]) -> list[_Read]:
        asked = [Range(places[row].offset, places[row].length) for row in rows]
        plan = plan_ranges(asked, max_gap_bytes=self._max_gap_bytes, max_bytes=self._max_bytes)
        reads = [_Read(object, whole, []) for whole in plan.reads] or [_Read(object, Range(0, 0), [])]
        for row, piece in zip(rows, plan.pieces, strict=True):
            reads[piece.read].rows.append(row)
        return reads

    def _read(self, read: _Read, places: Sequence[ByteRange]) -> list[tuple[int, Found]]:
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

    def _alone(self, place: ByteRange) -> Found:
        try:
            return self._store.read_version(place.object, place.offset, place.length)
        except ObjectNotFound as error:
            return error


def _cut(data: Buffer, whole: Range, place: ByteRange) -> Buffer:
    start = place.offset - whole.offset
    return memoryview(data)[start : start + place.length] if place.length else b""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdjacentReads:
    """Places of an object that one request reads.

    Attributes:
        object: the name.
        whole: range that is read.
        places: places that lie in it, each once; there may be but one.
    """

    object: str
    whole: Range
    places: tuple[ByteRange, ...]


def neighbours(places: Sequence[ByteRange], *, max_gap_bytes: int, max_bytes: int) -> list[AdjacentReads]:
    """Join places that are near each other; see ``ranges.plan_ranges``.

    Args:
        places: the places as they will be asked for; those of no bytes are left out.
        max_gap_bytes: read in vain rather than make another request.
        max_bytes: maximum bytes of one request, unless a place is larger by itself.

    Returns:
        Reads, ordered by the first place in each.
    """
    asked: defaultdict[str, dict[Range, int]] = defaultdict(dict)
    for row, place in enumerate(places):
        if place.length:
            asked[place.object].setdefault(Range(place.offset, place.length), row)
    found: list[tuple[int, AdjacentReads]] = []
    for object, rows in asked.items():
        plan = plan_ranges(list(rows), max_gap_bytes=max_gap_bytes, max_bytes=max_bytes)
        of: list[list[Range]] = [[] for _ in plan.reads]
        for number, piece in zip(rows, plan.pieces, strict=True):
            of[piece.read].append(number)
        for whole, some in zip(plan.reads, of, strict=True):
            together = AdjacentReads(
                object=object, whole=whole, places=tuple(ByteRange(object, *span) for span in some)
            )
            found.append((min(rows[span] for span in some), together))
    return [group for _, group in sorted(found, key=lambda item: item[0])]


_Found = tuple[Buffer, str] | None


class MemoryReservation(Protocol):
    """Memory that was set aside."""

    def release(self) -> None:
        """Give it back; again does nothing."""


class SharedReads:
    """A ``Versioned`` for places that are known beforehand, such as those of one request. Safe for threads.

    Whoever asks for the first place of a joined read makes it; whoever asks for another one meanwhile makes the next
    joined read and waits. What is given is copied, so that a joined read is let go when its last place was taken.
    Places that nobody told of, and those for whose joined read there is no memory, are read by themselves.

    Args:
        store: store that is read.
        places: places that will be asked for, about in this order, once each.
        reserve: function that sets memory aside for a joined read, without waiting; None where there is none.
        max_gap_bytes: read in vain rather than make another request.
        max_bytes: maximum bytes of one request. Smaller than where one caller reads all, so that several are under way.
    """

    def __init__(
        self,
        store: Versioned,
        places: Sequence[ByteRange],
        reserve: Callable[[int], MemoryReservation | None],
        *,
        max_gap_bytes: int = 64 << 10,
        max_bytes: int = 1 << 20,
    ) -> None:
        self._store = store
        self._reserve = reserve
        self._lock = threading.Lock()
        self._reads = _joined_reads(places, max_gap_bytes, max_bytes)
        self._read_of = {place: read for read in self._reads for place in read.waiting}
        self._next = 0

    @property
    def joins(self) -> bool:
        """Whether any of the places have neighbours."""
        return bool(self._reads)

    def read(self, object: str, offset: int, length: int) -> Buffer:
        """See ``Readable.read``."""
        return self.read_version(object, offset, length)[0]

    def read_version(self, object: str, offset: int, length: int) -> tuple[Buffer, str]:
        """See ``Versioned.read_version``."""
        place = ByteRange(object, offset, length)
        read = self._read_of.get(place)
        found = None if read is None else self._found(read)
        if read is not None and found is not None:
            start = offset - read.whole.offset
            found = bytes(memoryview(found[0])[start : start + length]), found[1]
        if read is not None:
            self._took(read, place)
        return self._store.read_version(*place) if found is None else found

    def close(self) -> None:
        """Let go of what nobody asked for."""
        with self._lock:
            for read in self._reads:
                read.let_go()

    def _found(self, read: "_SharedRead") -> _Found:
        """What a joined read gave; None where its places are read by themselves."""
        begun = self._begin(read)
        if begun is not None:
            self._make(read, begun)
        while not read.is_done and (other := self._begun_next()) is not None:
            self._make(*other)
        answer = begun or read.answer
        return None if answer is None else answer.result()

    def _begun_next(self) -> "tuple[_SharedRead, Future[_Found]] | None":
        """The first joined read that nobody has begun, if there is one and memory for it."""
        while (number := self._next) < len(self._reads):
            read = self._reads[number]
            begun = self._begin(read)
            if begun is not None:
                return read, begun
            with self._lock:
                if read.is_new:
                    return None  # there is no memory for it now
                self._next = max(self._next, number + 1)
        return None

    def _begin(self, read: "_SharedRead") -> "Future[_Found] | None":
        """The answer that the caller is to give; None where another one does, or there is no memory."""
        with self._lock:
            reservation = self._reserve(read.whole.length) if read.is_new else None
            if reservation is None:
                return None
            read.reservation, read.answer, read.is_new = reservation, Future(), False
            return read.answer

    def _make(self, read: "_SharedRead", answer: "Future[_Found]") -> None:
        try:
            answer.set_result(self._store.read_version(read.object, *read.whole))
        except ObjectNotFound:
            # Where the object ended early, those before that end are still to be had.
            answer.set_result(None)
        except BaseException as error:  # noqa: BLE001 (whoever waits for it gets it)
            answer.set_exception(error)

    def _took(self, read: "_SharedRead", place: ByteRange) -> None:
        with self._lock:
            read.waiting.discard(place)
            if not read.waiting:
                read.let_go()


class _SharedRead:
    """Several places of an object, read by one request."""

    __slots__ = ("answer", "is_new", "object", "reservation", "waiting", "whole")

    def __init__(self, object: str, whole: Range, waiting: set[ByteRange]) -> None:
        self.object = object
        self.whole = whole
        self.waiting = waiting
        self.answer: Future[_Found] | None = None
        self.reservation: MemoryReservation | None = None
        self.is_new = True

    @property
    def is_done(self) -> bool:
        return self.answer is None or self.answer.done()

    def let_go(self) -> None:
        if self.reservation is not None:
            self.reservation.release()
        self.answer, self.reservation, self.is_new = None, None, False


def _joined_reads(places: Sequence[ByteRange], max_gap_bytes: int, max_bytes: int) -> list[_SharedRead]:
    """The joined reads of several places each, in the order in which their first places stand."""
    found = neighbours(places, max_gap_bytes=max_gap_bytes, max_bytes=max_bytes)
    return [_SharedRead(group.object, group.whole, set(group.places)) for group in found if len(group.places) > 1]
