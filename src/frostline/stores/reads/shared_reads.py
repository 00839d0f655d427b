"""Reads neighbours of an object by one request for threads that ask for them one by one."""

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from frostline.errors import ObjectNotFound
from frostline.stores.base.protocols import Buffer, Place, Versioned
from frostline.stores.reads.coalesce import Range, plan_ranges

__all__ = ("AdjacentReads", "MemoryReservation", "SharedReads", "neighbours")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdjacentReads:
    """Places of an object that one request reads.

    Attributes:
        object: its name.
        whole: range that is read.
        places: places that lie in it, each once; there may be but one.
    """

    object: str
    whole: Range
    places: tuple[Place, ...]


def neighbours(places: Sequence[Place], *, max_gap_bytes: int, max_bytes: int) -> list[AdjacentReads]:
    """Join places that are near each other; see ``ranges.plan_ranges``.

    Args:
        places: as they will be asked for; those of no bytes are left out.
        max_gap_bytes: read in vain rather than make another request.
        max_bytes: maximum bytes of one request, unless a place is larger by itself.

    Returns:
        What is read, in the order in which the first place of each stands.
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
            together = AdjacentReads(object=object, whole=whole, places=tuple(Place(object, *span) for span in some))
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
    Places that nobody told of, and those for whose joined read there is no room, are read by themselves.

    Args:
        store: store that is read.
        places: places that will be asked for, about in this order, once each.
        room: sets memory aside for a joined read, without waiting; None where there is none.
        max_gap_bytes: read in vain rather than make another request.
        max_bytes: maximum bytes of one request. Smaller than where one caller reads all, so that several are under way.
    """

    def __init__(
        self,
        store: Versioned,
        places: Sequence[Place],
        room: Callable[[int], MemoryReservation | None],
        *,
        max_gap_bytes: int = 64 << 10,
        max_bytes: int = 1 << 20,
    ) -> None:
        self._store = store
        self._room = room
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
        place = Place(object, offset, length)
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

    def _found(self, read: "_Read") -> _Found:
        """What a joined read gave; None where its places are read by themselves."""
        begun = self._begin(read)
        if begun is not None:
            self._make(read, begun)
        while not read.is_done and (other := self._begun_next()) is not None:
            self._make(*other)
        answer = begun or read.answer
        return None if answer is None else answer.result()

    def _begun_next(self) -> "tuple[_Read, Future[_Found]] | None":
        """The first joined read that nobody has begun, if there is one and room for it."""
        while (number := self._next) < len(self._reads):
            read = self._reads[number]
            begun = self._begin(read)
            if begun is not None:
                return read, begun
            with self._lock:
                if read.is_new:
                    return None  # there is no room for it now
                self._next = max(self._next, number + 1)
        return None

    def _begin(self, read: "_Read") -> "Future[_Found] | None":
        """The answer that the caller is to give; None where another one does, or there is no room."""
        with self._lock:
            room = self._room(read.whole.length) if read.is_new else None
            if room is None:
                return None
            read.room, read.answer, read.is_new = room, Future(), False
            return read.answer

    def _make(self, read: "_Read", answer: "Future[_Found]") -> None:
        try:
            answer.set_result(self._store.read_version(read.object, *read.whole))
        except ObjectNotFound:
            # Where the object ended early, those before that end are still to be had.
            answer.set_result(None)
        except BaseException as error:  # noqa: BLE001 (whoever waits for it gets it)
            answer.set_exception(error)

    def _took(self, read: "_Read", place: Place) -> None:
        with self._lock:
            read.waiting.discard(place)
            if not read.waiting:
                read.let_go()


class _Read:
    """Several places of an object, read by one request."""

    __slots__ = ("answer", "is_new", "object", "room", "waiting", "whole")

    def __init__(self, object: str, whole: Range, waiting: set[Place]) -> None:
        self.object = object
        self.whole = whole
        self.waiting = waiting
        self.answer: Future[_Found] | None = None
        self.room: MemoryReservation | None = None
        self.is_new = True

    @property
    def is_done(self) -> bool:
        return self.answer is None or self.answer.done()

    def let_go(self) -> None:
        if self.room is not None:
            self.room.release()
        self.answer, self.room, self.is_new = None, None, False


def _joined_reads(places: Sequence[Place], max_gap_bytes: int, max_bytes: int) -> list[_Read]:
    """The joined reads of several places each, in the order in which their first places stand."""
    found = neighbours(places, max_gap_bytes=max_gap_bytes, max_bytes=max_bytes)
    return [_Read(group.object, group.whole, set(group.places)) for group in found if len(group.places) > 1]
