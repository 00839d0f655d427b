"""Reads blocks of neighbours before their samples are asked for, and keeps each sample until somebody takes it."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Protocol

from frostline.errors import ObjectNotFound
from frostline.stores.base.protocols import Buffer, Place, Versioned
from frostline.stores.reads.shared_reads import AdjacentReads, neighbours

__all__ = ("BlockReads", "ShrinkableReservation")

# Blocks of a megabyte over new connections take six round trips each: with fewer of them, 150 ms leave a link idle.
_AT_ONCE = 16
# Headers and labels between the members of a shard, and no samples that are not wanted.
_MAX_GAP_BYTES = 8 << 10
_MAX_BYTES = 4 << 20

_Found = tuple[Buffer, str]


class ShrinkableReservation(Protocol):
    """Memory that was set aside, and is given back piece by piece."""

    def shrink(self, nbytes: int) -> None:
        """Keep only so much of it."""

    def release(self) -> None:
        """Give it back; again does nothing."""


class BlockReads:
    """A ``Versioned`` for places that are known long before, in the order in which they will be asked for.

    AdjacentReads are read by one request, cut apart when it has come, and let go one by one as they are taken. Some
    requests are under way at once, as long as there is room and nobody said to wait (``begin``). Who asks for a place
    that was not begun begins its request, or reads the place alone where there is no room: nobody waits for room.
    A place that was given or lost, or that nobody told of, is read by itself. Safe for threads.

    Args:
        store: store that is read.
        threads: executor whose threads wait for the store.
        room: sets memory aside for a request, without waiting; None where there is none.
        is_here: whether a place of an object of that version need not be read at all.
    """

    def __init__(
        self,
        store: Versioned,
        threads: Executor,
        room: Callable[[int], ShrinkableReservation | None],
        is_here: Callable[[Place, str], bool] = lambda place, version: False,  # noqa: ARG005
    ) -> None:
        self._store = store
        self._is_here = is_here
        self._threads = threads
        self._room = room
        # A pass that was dropped in a cycle is closed by the garbage collector, which may run in any of these threads.
        self._lock = threading.RLock()
        self._told = 0
        self._may_begin = 0
        self._under_way = 0
        self._new: deque[_Read] = deque()
        self._read_of: dict[Place, _Read] = {}

    @property
    def told(self) -> int:
        """Requests of which it was told, so far."""
        return self._told

    def expect(self, places: Sequence[Place], versions: Sequence[str] = ()) -> None:
        """These will be asked for after those before, about in this order, once each.

        Args:
            places: places of the samples.
            versions: versions of their objects as they were listed; none where nobody knows any.
        """
        if len(versions):
            pairs = zip(places, versions, strict=True)
            places = [place for place, version in pairs if not self._is_here(place, version)]
        found = neighbours(places, max_gap_bytes=_MAX_GAP_BYTES, max_bytes=_MAX_BYTES)
        with self._lock:
            for pending in found:
                read = _Read(self._told, pending)
                self._told += 1
                self._new.append(read)
                self._read_of.update(dict.fromkeys(pending.places, read))

    def begin(self, requests: int) -> None:
        """The first so many of all requests may begin."""
        with self._lock:
            self._may_begin = max(self._may_begin, requests)
        self._begin()

    def forget(self, requests: int) -> None:
        """Let go of what nobody took of the first so many."""
        with self._lock:
            left = {place: read for place, read in self._read_of.items() if read.number < requests}
            for place, read in left.items():
                self._take(read, place)
        self._begin()

    def holds(self, places: Sequence[Place]) -> bool:
        """Whether it was told of all of them, and none was taken."""
        return all(place in self._read_of for place in places)

    def read(self, object: str, offset: int, length: int) -> Buffer:
        """See ``Readable.read``."""
        return self.read_version(object, offset, length)[0]

    def read_version(self, object: str, offset: int, length: int) -> _Found:
        """See ``Versioned.read_version``."""
        place = Place(object, offset, length)
        found = self._found(place)
        return self._store.read_version(*place) if found is None else found

    def close(self) -> None:
        """Let go of all; memory of requests that are under way is given back when they end."""
        self.forget(self._told)

    def _found(self, place: Place) -> _Found | None:
        """What was read with its neighbours; None where it is to be read alone."""
        with self._lock:
            read = self._read_of.get(place)
            is_mine = read is not None and read.is_new and self._has_begun(read)
            if read is None or read.is_new:
                if read is not None:
                    self._take(read, place)
                return None
        if is_mine:
            self._make(read)
        try:
            read.is_there.result()
        finally:
            with self._lock:
                found = self._take(read, place)
            self._begin()
        return found

    def _begin(self) -> None:
        """Begin what may begin now."""
        while True:
            with self._lock:
                while self._new and not (self._new[0].is_new and self._new[0].waiting):
                    self._new.popleft()
                is_next = self._new and self._under_way < _AT_ONCE and self._new[0].number < self._may_begin
                if not is_next or not self._has_begun(self._new[0]):
                    return
                read = self._new.popleft()
            self._threads.submit(self._make, read)

    def _has_begun(self, read: "_Read") -> bool:
        read.room = self._room(read.what.whole.length)
        read.is_new = read.room is None
        self._under_way += not read.is_new
        return not read.is_new

    def _make(self, read: "_Read") -> None:
        what, error, found = read.what, None, None
        try:
            if read.waiting:  # else it was forgotten before a thread came to it
                found = self._store.read_version(what.object, *what.whole)
        except ObjectNotFound:
            pass  # where the object ended early, those before that end are still to be had, one by one
        except BaseException as failure:  # noqa: BLE001 (whoever waits for it gets it)
            error = failure
        with self._lock:
            self._under_way -= 1
            self._cut(read, found)
        if error is None:
            read.is_there.set_result(None)
        else:
            read.is_there.set_exception(error)
        self._begin()

    def _cut(self, read: "_Read", found: _Found | None) -> None:
        """Keep what is still wanted, or nothing: then each is read by itself when it is asked for."""
        if found is not None:
            whole = memoryview(found[0])
            for place in tuple(read.waiting):
                start = place.offset - read.what.whole.offset
                read.pieces[place] = bytes(whole[start : start + place.length]), found[1]
        else:
            for place in tuple(read.waiting):
                self._read_of.pop(place, None)
            read.waiting.clear()
        self._make_room(read)

    def _take(self, read: "_Read", place: Place) -> _Found | None:
        if self._read_of.get(place) is read:
            del self._read_of[place]
        read.waiting.discard(place)
        found = read.pieces.pop(place, None)
        if found is not None:
            self._make_room(read)
        return found

    def _make_room(self, read: "_Read") -> None:
        """Give back what its pieces do not need."""
        if read.room is None:
            return
        if read.pieces:
            read.room.shrink(min(sum(place.length for place in read.pieces), read.what.whole.length))
        else:
            read.room.release()
            read.room = None


class _Read:
    """A request for a block.

    Attributes:
        number: number of all reads.
        what: is read.
        waiting: places that nobody took yet.
        pieces: pieces that have come, by their place.
        is_there: done when it has come.
        is_new: nobody began it.
        room: its memory.
    """

    __slots__ = ("is_new", "is_there", "number", "pieces", "room", "waiting", "what")

    def __init__(self, number: int, what: AdjacentReads) -> None:
        self.number = number
        self.what = what
        self.waiting = set(what.places)
        self.pieces: dict[Place, _Found] = {}
        self.is_there: Future[None] = Future()
        self.is_new = True
        self.room: ShrinkableReservation | None = None
