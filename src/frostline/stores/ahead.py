"""Reads places before they are asked for: as many at once as there are threads and memory, or keys in flight."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future
from functools import partial
from typing import NamedTuple

from frostline.stores.faces import Batched, Buffer, Place, Versioned
from frostline.stores.together import Room

__all__ = ("Ahead",)

_Found = tuple[Buffer, str]


class _Read(NamedTuple):
    place: Place
    room: Room
    answer: "Future[_Found]"


class Ahead:
    """A ``Versioned`` that is told which places will be asked for. Safe for threads.

    Reading waits for its store while whoever decodes holds memory for decoding; so reads that are under way hold
    memory for their bytes alone, and there may be many more of them. A store that has many reads under way at once
    without a thread for each (``Batched``) is given all that may begin. Places that nobody told of, and those for
    which there is no room yet, are read by whoever asks.

    Args:
        store: that is read.
        room: sets memory aside for a place, without waiting; None where there is none.
        threads: that wait for the store.
    """

    def __init__(self, store: Versioned, room: Callable[[int], Room | None], threads: Executor) -> None:
        self._store = store
        self._room = room
        self._threads = threads
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
            read = self._begun.pop(place, None)
        if read is None:
            return self._store.read_version(*place)
        try:
            return read.answer.result()
        finally:
            read.room.release()
            self._begin()

    def close(self) -> None:
        """Let go of what nobody asked for; memory of reads that are under way is given back when they end."""
        with self._lock:
            left = list(self._begun.values())
            self._waiting.clear()
            self._begun.clear()
        for read in left:
            read.answer.cancel()
            read.answer.add_done_callback(partial(_let_go, read.room))

    def _begin(self) -> None:
        begun: list[_Read] = []
        with self._lock:
            while self._waiting:
                place = next(iter(self._waiting))
                room = self._room(place.length)
                if room is None:
                    break
                del self._waiting[place]
                begun.append(_Read(place, room, Future()))
                self._begun[place] = begun[-1]
        if isinstance(self._store, Batched):
            if begun:
                self._threads.submit(self._read_many, self._store, begun)
            return
        for read in begun:
            self._threads.submit(self._read_one, read)

    def _read_one(self, read: _Read) -> None:
        if read.answer.set_running_or_notify_cancel():
            try:
                read.answer.set_result(self._store.read_version(*read.place))
            except BaseException as error:  # noqa: BLE001 (whoever asks for it gets it)
                read.answer.set_exception(error)

    def _read_many(self, store: Batched, reads: Sequence[_Read]) -> None:
        left = {number: read.answer for number, read in enumerate(reads) if read.answer.set_running_or_notify_cancel()}
        numbers = list(left)
        try:
            for index, found in store.read_many([reads[number].place for number in numbers]):
                answer = left.pop(numbers[index])
                if isinstance(found, tuple):
                    answer.set_result(found)
                else:
                    answer.set_exception(found)
        except BaseException as error:  # noqa: BLE001 (whoever asks for one gets it)
            for answer in left.values():
                answer.set_exception(error)


def _let_go(room: Room, _: "Future[_Found]") -> None:
    room.release()
