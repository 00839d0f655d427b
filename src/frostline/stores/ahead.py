"""Reads places before they are asked for: as many at once as there are threads and memory, or keys in flight."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Executor, Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from frostline.errors import FrostlineError
from frostline.stores.faces import Batched, Buffer, Place, Versioned
from frostline.stores.late import LateReads
from frostline.stores.together import Room

__all__ = ("Ahead", "SecondReads")

_Found = tuple[Buffer, str]


@dataclass(slots=True, kw_only=True, eq=False)
class _Read:
    place: Place
    room: Room
    answer: "Future[_Found]" = field(default_factory=Future)
    begun_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondReads:
    """How reads of a store are made a second time.

    Attributes:
        late: knows which are stragglers.
        threads: that make them, before what else they have to do.
        made: called for each.
    """

    late: LateReads
    threads: Executor
    made: Callable[[], None]


class Ahead:
    """A ``Versioned`` that is told which places will be asked for. Safe for threads.

    Reading waits for its store while whoever decodes holds memory for decoding; so reads that are under way hold
    memory for their bytes alone, and there may be many more of them. A store that has many reads under way at once
    without a thread for each (``Batched``) is given all that may begin. Places that nobody told of, and those for
    which there is no room yet, are read by whoever asks. Where somebody waits for a read that is a straggler it is
    made a second time, before others, and what comes first counts.

    Args:
        store: that is read.
        room: sets memory aside for a place, without waiting; None where there is none.
        threads: that wait for the store.
        second: how reads are made a second time; None where none is.
    """

    def __init__(
        self,
        store: Versioned,
        room: Callable[[int], Room | None],
        threads: Executor,
        second: SecondReads | None = None,
    ) -> None:
        self._store = store
        self._room = room
        self._threads = threads
        self._second = second
        self._lock = threading.Lock()
        self._waiting: OrderedDict[Place, None] = OrderedDict()
        self._begun: dict[Place, _Read] = {}

    def expect(self, places: Iterable[Place]) -> None:
        """Begin to read what will be asked for, once each, about in this order."""
        with self._lock:
            self._waiting.update((place, None) for place in places if place.length and place not in self._begun)
        self._begin()

    def read(self, object: str, offset: int, length: int) -> Buffer:
        """See ``Readable.read``."""
        return self.read_version(object, offset, length)[0]

    def read_version(self, object: str, offset: int, length: int) -> tuple[Buffer, str]:
        """See ``Versioned.read_version``."""
        place = Place(object, offset, length)
        with self._lock:
            self._waiting.pop(place, None)
            read = self._begun.get(place)
        if read is None:
            return self._store.read_version(*place)
        try:
            return self._waited(read)
        finally:
            self._taken(read)

    def close(self) -> None:
        """Let go of all: who waits is told at once that it was cancelled. Calling it again does nothing.

        Memory of reads that are under way is given back when they end.
        """
        with self._lock:
            left = list(self._begun.values())
            self._waiting.clear()
            self._begun.clear()
        for read in left:
            if read.answer.cancel() or not _settled(partial(read.answer.set_exception, CancelledError())):
                read.room.release()

    def _waited(self, read: _Read) -> _Found:
        second = self._second
        while second is not None:
            with suppress(TimeoutError):
                return read.answer.result(second.late.wait_s(read.place.length, read.begun_at))
            if read.answer.done():  # with such an error of the store, perhaps
                break
            if read.begun_at is not None and second.late.is_late(read.place.length, read.begun_at):
                second.made()
                second.threads.submit(self._read_again, read)
                break
        return read.answer.result()

    def _read_again(self, read: _Read) -> None:
        try:
            found = self._store.read_version(*read.place)
        except FrostlineError:  # the first read may bring it
            return
        with self._lock:
            is_open = self._begun.pop(read.place, None) is read
        # Where the first read is under way, its end gives the memory back.
        if is_open and not _settled(partial(read.answer.set_result, found)):
            read.room.release()
            self._begin()

    def _taken(self, read: _Read) -> None:
        with self._lock:
            is_open = self._begun.pop(read.place, None) is read
        if is_open:
            read.room.release()
            self._begin()

    def _begin(self) -> None:
        begun: list[_Read] = []
        with self._lock:
            while self._waiting:
                place = next(iter(self._waiting))
                room = self._room(place.length)
                if room is None:
                    break
                del self._waiting[place]
                begun.append(_Read(place=place, room=room))
                self._begun[place] = begun[-1]
        if isinstance(self._store, Batched):
            if begun:
                self._threads.submit(self._read_many, self._store, begun)
            return
        for read in begun:
            self._threads.submit(self._read_one, read)

    def _read_one(self, read: _Read) -> None:
        if read.answer.set_running_or_notify_cancel():
            if self._second is not None:
                read.begun_at = self._second.late.now()
            try:
                found = self._store.read_version(*read.place)
            except BaseException as error:  # noqa: BLE001 (whoever asks for it gets it)
                self._tell(read, error)
                return
            if self._second is not None and read.begun_at is not None:
                self._second.late.took(read.place.length, read.begun_at)
            self._tell(read, found)

    def _read_many(self, store: Batched, reads: Sequence[_Read]) -> None:
        wanted = [read for read in reads if read.answer.set_running_or_notify_cancel()]
        left = dict(enumerate(wanted))
        try:
            for index, found in store.read_many([read.place for read in wanted]):
                self._tell(left.pop(index), found)
        except BaseException as error:  # noqa: BLE001 (whoever asks for one gets it)
            for read in left.values():
                self._tell(read, error)

    def _tell(self, read: _Read, found: _Found | BaseException) -> None:
        """Hand on what became of a read; where nobody waits for it any more, its memory is free now."""
        if isinstance(found, BaseException):
            settle = partial(read.answer.set_exception, found)
        else:
            settle = partial(read.answer.set_result, found)
        if not _settled(settle):
            read.room.release()
            self._begin()


def _settled(settle: Callable[[], None]) -> bool:
    """Whether this settled a future, and not another thread before."""
    try:
        settle()
    except InvalidStateError:
        return False
    return True
