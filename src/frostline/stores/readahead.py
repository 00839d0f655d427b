"""Reads places, and blocks of neighbours, before they are asked for, within bounds of memory and threads."""

import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Executor, Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from frostline.core.errors import FrostlineError, ObjectNotFound, Unavailable
from frostline.stores.protocols import Batched, Buffer, ByteRange, Versioned
from frostline.stores.reads import AdjacentReads, MemoryReservation, neighbours
from frostline.stores.retry import HedgedReads

__all__ = (
    "BlockReads",
    "ReadAhead",
    "ReadAheadQueue",
    "SecondReads",
    "ShrinkableReservation",
)


_Found = tuple[Buffer, str]


@dataclass(slots=True, kw_only=True, eq=False)
class _Read:
    """A read that was begun.

    Attributes:
        place: place that is read.
        reservation: the memory.
        answer: result of the read.
        begun_at: the time when a thread came to it.
        is_again: True if it is made a second time.
    """

    place: ByteRange
    reservation: MemoryReservation
    answer: "Future[_Found]" = field(default_factory=Future)
    begun_at: float | None = None
    is_again: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondReads:
    """How reads of a store are made a second time.

    Attributes:
        late: timer that knows which reads are stragglers.
        threads: executor whose threads make them, before what else they have to do.
        made: function that is called for each.
    """

    late: HedgedReads
    threads: Executor
    made: Callable[[], None]


class ReadAheadQueue:
    """Where places that several ``ReadAhead`` were told of wait for memory and a thread, first come first served.

    Else what comes free would go to whoever was told last, and what has to be handed out first would come last. Safe
    for threads.

    Args:
        reserve: function that sets memory aside for a place, without waiting; None where there is none now.
        threads: executor whose threads wait for stores.
        maximum: reads under way in them at once.
        max_bytes: bytes of the largest place that there is ever memory for.

    Attributes:
        lock: lock that guards the queue, and what its ``ReadAhead`` have begun.
    """

    def __init__(
        self,
        reserve: Callable[[int], MemoryReservation | None],
        threads: Executor,
        *,
        maximum: int,
        max_bytes: int = sys.maxsize,
    ) -> None:
        self.take = reserve
        self.lock = threading.RLock()
        self._threads = threads
        self._maximum = maximum
        self._max_bytes = max_bytes
        self._under_way = 0
        self._waiting: OrderedDict[tuple[ReadAhead, ByteRange], None] = OrderedDict()

    def join(self, ahead: "ReadAhead", places: Iterable[ByteRange]) -> None:
        """Have places wait, about in this order, until ``go_on``; those for which there is never memory do not."""
        with self.lock:
            for place in places:
                if 0 < place.length <= self._max_bytes:
                    self._waiting[ahead, place] = None

    def leave(self, ahead: "ReadAhead", places: Iterable[ByteRange] | None = None) -> None:
        """Have places wait no more; None are all of a ``ReadAhead``."""
        with self.lock:
            if places is None:
                places = [place for reader, place in self._waiting if reader is ahead]
            for place in places:
                self._waiting.pop((ahead, place), None)

    def go_on(self) -> None:
        """Begin what may begin now."""
        begun: dict[ReadAhead, list[_Read]] = {}
        with self.lock:
            while self._waiting:
                ahead, place = next(iter(self._waiting))
                if not ahead.is_batched and self._under_way >= self._maximum:
                    break
                reservation = self.take(place.length)
                if reservation is None:
                    break
                del self._waiting[ahead, place]
                self._under_way += not ahead.is_batched
                begun.setdefault(ahead, []).append(ahead.begin(place, reservation))
        for ahead, reads in begun.items():
            if ahead.is_batched:
                self._threads.submit(ahead.make_all, reads)
                continue
            for read in reads:
                self._threads.submit(self._make, ahead, read)

    def _make(self, ahead: "ReadAhead", read: _Read) -> None:
        try:
            ahead.make(read)
        finally:
            with self.lock:
                self._under_way -= 1
            self.go_on()


class ReadAhead:
    """A ``Versioned`` that is told which places will be asked for. Safe for threads.

    Reading waits for its store while whoever decodes holds memory for decoding; so reads that are under way hold
    memory for their bytes alone, and there may be many more of them. A store that has many reads under way at once
    without a thread for each (``Batched``) is given all that may begin. Places that nobody told of, and those that
    still wait, are read by whoever asks. Where somebody waits for a read that is a straggler it is made a second time,
    before others, and what comes first counts.

    Args:
        store: store that is read.
        line: the line in which places wait.
        second: the way that reads are made a second time; None where none is. A ``Batched`` store does so itself.
    """

    def __init__(self, store: Versioned, line: ReadAheadQueue, second: SecondReads | None = None) -> None:
        self._store = store
        self._line = line
        self.is_batched = isinstance(store, Batched)
        self._second = None if self.is_batched else second
        self._begun: dict[ByteRange, _Read] = {}
        self._is_closed = False

    def expect(self, places: Iterable[ByteRange]) -> None:
        """Begin to read what will be asked for, once each, about in this order."""
        with self._line.lock:
            if not self._is_closed:
                self._line.join(self, [place for place in places if place not in self._begun])
        self._line.go_on()

    def read(self, object: str, offset: int, length: int) -> Buffer:
        """See ``Readable.read``."""
        return self.read_version(object, offset, length)[0]

    def read_version(self, object: str, offset: int, length: int) -> tuple[Buffer, str]:
        """See ``Versioned.read_version``.

        Raises:
            CancelledError: the request was closed.
        """
        place = ByteRange(object, offset, length)
        with self._line.lock:
            if self._is_closed:
                raise CancelledError
            self._line.leave(self, [place])
            read = self._begun.get(place)
        if read is None:
            return self._store.read_version(*place)
        try:
            return self._waited(read)
        finally:
            if self._drop(read):
                self._give_back(read)

    def close(self) -> None:
        """Let go of all: who waits is told at once that it was cancelled. Calling it again does nothing.

        Memory of reads that are under way is given back when they end.
        """
        with self._line.lock:
            self._is_closed = True
            self._line.leave(self)
            left = list(self._begun.values())
            self._begun.clear()
        for read in left:
            if read.answer.cancel() or not _settled(partial(read.answer.set_exception, CancelledError())):
                self._give_back(read)

    def begin(self, place: ByteRange, reservation: MemoryReservation) -> _Read:
        """A place is read from now on; for the line, which holds its lock."""
        read = self._begun[place] = _Read(place=place, reservation=reservation)
        return read

    def make(self, read: _Read) -> None:
        """Read it, in this thread; for the line."""
        if not read.answer.set_running_or_notify_cancel():
            return
        late = None if self._second is None else self._second.late
        begun_at = read.begun_at = None if late is None else late.now()
        try:
            found = self._store.read_version(*read.place)
        except BaseException as error:  # noqa: BLE001 (whoever asks for it gets it)
            self._tell(read, error)
            return
        if late is not None and begun_at is not None:
            late.record_read(read.place.length, begun_at)
        self._tell(read, found)

    def make_all(self, reads: Sequence[_Read]) -> None:
        """Read them, in this thread, from a store that takes many; for the line."""
        assert isinstance(self._store, Batched)
        wanted = [read for read in reads if read.answer.set_running_or_notify_cancel()]
        left = dict(enumerate(wanted))
        try:
            for index, found in self._store.read_many([read.place for read in wanted]):
                self._tell(left.pop(index), found)
        except BaseException as error:  # noqa: BLE001 (whoever asks for one gets it)
            for read in left.values():
                self._tell(read, error)

    def _waited(self, read: _Read) -> _Found:
        second = self._second
        while second is not None:
            with suppress(TimeoutError):
                return read.answer.result(second.late.wait_s(read.place.length, read.begun_at))
            # The error of a store that is done may be such a one.
            if read.answer.done() or self._is_again(read, second):
                break
        return read.answer.result()

    def _is_again(self, read: _Read, second: SecondReads) -> bool:
        """Whether it is made a second time, from now on perhaps."""
        with self._line.lock:
            begun_at, nbytes = read.begun_at, read.place.length
            if not read.is_again and begun_at is not None and second.late.is_late(nbytes, begun_at):
                read.is_again = True
                with suppress(Unavailable):  # the node is stopping
                    second.threads.submit(self._read_again, read, second)
            return read.is_again

    def _read_again(self, read: _Read, second: SecondReads) -> None:
        reservation = None if read.answer.done() else self._line.take(read.place.length)
        if reservation is None:
            return
        second.made()
        try:
            found = self._store.read_version(*read.place)
        except FrostlineError:  # the first read may bring it
            return
        finally:
            reservation.release()
        # Where the first read is under way, its end gives its memory back.
        if self._drop(read) and not _settled(partial(read.answer.set_result, found)):
            self._give_back(read)

    def _drop(self, read: _Read) -> bool:
        """Whether this let go of a read, and nobody before."""
        with self._line.lock:
            is_mine = self._begun.get(read.place) is read
            if is_mine:
                del self._begun[read.place]
        return is_mine

    def _tell(self, read: _Read, found: _Found | BaseException) -> None:
        """Hand on what became of a read; where nobody waits for it any more, its memory is free now."""
        if isinstance(found, BaseException):
            settle = partial(read.answer.set_exception, found)
        else:
            settle = partial(read.answer.set_result, found)
        if not _settled(settle):
            self._give_back(read)

    def _give_back(self, read: _Read) -> None:
        read.reservation.release()
        self._line.go_on()


def _settled(settle: Callable[[], None]) -> bool:
    """Whether this settled a future, and not another thread before."""
    try:
        settle()
    except InvalidStateError:
        return False
    return True


# Blocks of a megabyte over new connections take six round trips each: with fewer of them, 150 ms leave a link idle.
_AT_ONCE = 16
# Headers and labels between the members of a shard, and no samples that are not wanted.
_MAX_GAP_BYTES = 8 << 10
_MAX_BYTES = 4 << 20


class ShrinkableReservation(Protocol):
    """Memory that was set aside, and is given back piece by piece."""

    def shrink(self, nbytes: int) -> None:
        """Keep only so much of it."""

    def release(self) -> None:
        """Give it back; again does nothing."""


class BlockReads:
    """A ``Versioned`` for places that are known long before, in the order in which they will be asked for.

    AdjacentReads are read by one request, cut apart when it has come, and let go one by one as they are taken. Some
    requests are under way at once, as long as there is memory and nobody said to wait (``begin``). Who asks for a place
    that was not begun begins its request, or reads the place alone where there is no memory: nobody waits for memory.
    A place that was given or lost, or that nobody told of, is read by itself. Safe for threads.

    Args:
        store: store that is read.
        threads: executor whose threads wait for the store.
        reserve: function that sets memory aside for a request, without waiting; None where there is none.
        is_here: True if a place of an object of that version need not be read at all.
    """

    def __init__(
        self,
        store: Versioned,
        threads: Executor,
        reserve: Callable[[int], ShrinkableReservation | None],
        is_here: Callable[[ByteRange, str], bool] = lambda place, version: False,  # noqa: ARG005
    ) -> None:
        self._store = store
        self._is_here = is_here
        self._threads = threads
        self._reserve = reserve
        # A pass that was dropped in a cycle is closed by the garbage collector, which may run in any of these threads.
        self._lock = threading.RLock()
        self._told = 0
        self._may_begin = 0
        self._under_way = 0
        self._new: deque[_BlockRead] = deque()
        self._read_of: dict[ByteRange, _BlockRead] = {}

    @property
    def told(self) -> int:
        """Requests of which it was told, so far."""
        return self._told

    def expect(self, places: Sequence[ByteRange], versions: Sequence[str] = ()) -> None:
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
                read = _BlockRead(self._told, pending)
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

    def holds(self, places: Sequence[ByteRange]) -> bool:
        """Whether it was told of all of them, and none was taken."""
        return all(place in self._read_of for place in places)

    def read(self, object: str, offset: int, length: int) -> Buffer:
        """See ``Readable.read``."""
        return self.read_version(object, offset, length)[0]

    def read_version(self, object: str, offset: int, length: int) -> _Found:
        """See ``Versioned.read_version``."""
        place = ByteRange(object, offset, length)
        found = self._found(place)
        return self._store.read_version(*place) if found is None else found

    def close(self) -> None:
        """Let go of all; memory of requests that are under way is given back when they end."""
        self.forget(self._told)

    def _found(self, place: ByteRange) -> _Found | None:
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

    def _has_begun(self, read: "_BlockRead") -> bool:
        read.reservation = self._reserve(read.what.whole.length)
        read.is_new = read.reservation is None
        self._under_way += not read.is_new
        return not read.is_new

    def _make(self, read: "_BlockRead") -> None:
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

    def _cut(self, read: "_BlockRead", found: _Found | None) -> None:
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
        self._shrink(read)

    def _take(self, read: "_BlockRead", place: ByteRange) -> _Found | None:
        if self._read_of.get(place) is read:
            del self._read_of[place]
        read.waiting.discard(place)
        found = read.pieces.pop(place, None)
        if found is not None:
            self._shrink(read)
        return found

    def _shrink(self, read: "_BlockRead") -> None:
        """Give back what its pieces do not need."""
        if read.reservation is None:
            return
        if read.pieces:
            read.reservation.shrink(min(sum(place.length for place in read.pieces), read.what.whole.length))
        else:
            read.reservation.release()
            read.reservation = None


class _BlockRead:
    """A request for a block.

    Attributes:
        number: number of all reads.
        what: neighbouring places that are read together.
        waiting: places that nobody took yet.
        pieces: pieces that have come, by their place.
        is_there: event or future, done when it has come.
        is_new: True if nobody began it.
        reservation: the memory.
    """

    __slots__ = ("is_new", "is_there", "number", "pieces", "reservation", "waiting", "what")

    def __init__(self, number: int, what: AdjacentReads) -> None:
        self.number = number
        self.what = what
        self.waiting = set(what.places)
        self.pieces: dict[ByteRange, _Found] = {}
        self.is_there: Future[None] = Future()
        self.is_new = True
        self.reservation: ShrinkableReservation | None = None
