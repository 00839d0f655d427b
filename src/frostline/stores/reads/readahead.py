"""Reads places before they are asked for: as many at once as there are threads and memory, or keys in flight."""

import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Executor, Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from frostline.errors import FrostlineError, Unavailable
from frostline.stores.base.protocols import Batched, Buffer, Place, Versioned
from frostline.stores.reads.shared_reads import MemoryReservation
from frostline.stores.wrappers.hedging import HedgedReads

__all__ = ("ReadAhead", "ReadAheadQueue", "SecondReads")

_Found = tuple[Buffer, str]


@dataclass(slots=True, kw_only=True, eq=False)
class _Read:
    """A read that was begun.

    Attributes:
        place: place that is read.
        room: its memory.
        answer: result of the read.
        begun_at: when a thread came to it.
        is_again: it is made a second time.
    """

    place: Place
    room: MemoryReservation
    answer: "Future[_Found]" = field(default_factory=Future)
    begun_at: float | None = None
    is_again: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondReads:
    """How reads of a store are made a second time.

    Attributes:
        late: knows which are stragglers.
        threads: executor whose threads make them, before what else they have to do.
        made: called for each.
    """

    late: HedgedReads
    threads: Executor
    made: Callable[[], None]


class ReadAheadQueue:
    """Where places that several ``ReadAhead`` were told of wait for memory and a thread, first come first served.

    Else what comes free would go to whoever was told last, and what has to be handed out first would come last. Safe
    for threads.

    Args:
        room: sets memory aside for a place, without waiting; None where there is none now.
        threads: executor whose threads wait for stores.
        maximum: reads under way in them at once.
        max_bytes: bytes of the largest place that there is ever room for.

    Attributes:
        lock: guards it, and what its ``ReadAhead`` have begun.
    """

    def __init__(
        self,
        room: Callable[[int], MemoryReservation | None],
        threads: Executor,
        *,
        maximum: int,
        max_bytes: int = sys.maxsize,
    ) -> None:
        self.take = room
        self.lock = threading.RLock()
        self._threads = threads
        self._maximum = maximum
        self._max_bytes = max_bytes
        self._under_way = 0
        self._waiting: OrderedDict[tuple[ReadAhead, Place], None] = OrderedDict()

    def join(self, ahead: "ReadAhead", places: Iterable[Place]) -> None:
        """They wait, about in this order, until ``go_on``; those for which there is never room do not."""
        with self.lock:
            for place in places:
                if 0 < place.length <= self._max_bytes:
                    self._waiting[ahead, place] = None

    def leave(self, ahead: "ReadAhead", places: Iterable[Place] | None = None) -> None:
        """They wait no more; None are all of an ``ReadAhead``."""
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
                room = self.take(place.length)
                if room is None:
                    break
                del self._waiting[ahead, place]
                self._under_way += not ahead.is_batched
                begun.setdefault(ahead, []).append(ahead.begin(place, room))
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
        line: in which places wait.
        second: how reads are made a second time; None where none is. A ``Batched`` store does so itself.
    """

    def __init__(self, store: Versioned, line: ReadAheadQueue, second: SecondReads | None = None) -> None:
        self._store = store
        self._line = line
        self.is_batched = isinstance(store, Batched)
        self._second = None if self.is_batched else second
        self._begun: dict[Place, _Read] = {}
        self._is_closed = False

    def expect(self, places: Iterable[Place]) -> None:
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
        place = Place(object, offset, length)
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

    def begin(self, place: Place, room: MemoryReservation) -> _Read:
        """A place is read from now on; for the line, which holds its lock."""
        read = self._begun[place] = _Read(place=place, room=room)
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
            late.took(read.place.length, begun_at)
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
        room = None if read.answer.done() else self._line.take(read.place.length)
        if room is None:
            return
        second.made()
        try:
            found = self._store.read_version(*read.place)
        except FrostlineError:  # the first read may bring it
            return
        finally:
            room.release()
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
        read.room.release()
        self._line.go_on()


def _settled(settle: Callable[[], None]) -> bool:
    """Whether this settled a future, and not another thread before."""
    try:
        settle()
    except InvalidStateError:
        return False
    return True
