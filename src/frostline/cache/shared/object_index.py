"""Remembers in which shared object each row lies. Pure."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Self

import numpy as np
import numpy.typing as npt

from frostline.cache.rows import IdIndex
from frostline.cache.shared.object_layout import Bundle

__all__ = ("KnownRows", "Place")

# What a row takes at most, just after the arrays doubled: four places of an id and a slot, two of where it lies.
_BYTES_PER_ROW = 96

Place = tuple[Bundle, int]
"""An object, and which of its rows."""

# More than jobs use at a time.
_MAX_SCOPES = 1024
_NOWHERE = -1
_Ints = npt.NDArray[np.int64]


class KnownRows:
    """Where rows lie. Not safe for threads.

    Args:
        max_rows: maximum rows of all scopes together; beyond that, scopes that were not asked for longest are
            forgotten.
    """

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._shelves: OrderedDict[bytes, _Shelf] = OrderedDict()

    @classmethod
    def within(cls, memory_bytes: int) -> Self:
        """As many as that memory holds."""
        return cls(memory_bytes // _BYTES_PER_ROW)

    def __len__(self) -> int:
        return sum(len(shelve) for shelve in self._shelves.values())

    def is_looked_through(self, scope: bytes) -> bool:
        """Whether all rows of a scope are known that were there at some time."""
        return scope in self._shelves and self._shelves[scope].is_looked_through

    def has_room(self, scope: bytes, rows: int) -> bool:
        """Whether so many more rows of a scope could be remembered."""
        shelf = self._shelves.get(scope)
        return (0 if shelf is None else len(shelf)) + rows <= self._max_rows

    def names(self, scope: bytes) -> set[str]:
        """Of the objects that were added."""
        shelf = self._shelves.get(scope)
        return set() if shelf is None else {bundle.name for bundle in shelf.bundles if bundle is not None}

    def add(self, bundle: Bundle, keys: Sequence[bytes]) -> None:
        """Remember the rows of an object, in their order, if there is room for them."""
        shelf = self._shelves.setdefault(bundle.scope, _Shelf())
        self._shelves.move_to_end(bundle.scope)
        while len(self) + len(keys) > self._max_rows and len(self._shelves) > 1:
            self._shelves.popitem(last=False)
        if len(self) + len(keys) <= self._max_rows:
            shelf.add(bundle, keys)

    def note(self, scope: bytes) -> None:
        """Remember that a scope was looked through, though it may have no rows."""
        self._shelves.setdefault(scope, _Shelf()).is_looked_through = True
        self._shelves.move_to_end(scope)
        while len(self._shelves) > _MAX_SCOPES:
            self._shelves.popitem(last=False)

    def find(self, scope: bytes, keys: Sequence[bytes]) -> list[Place | None]:
        """Where each row lies, None where nobody knows."""
        shelf = self._shelves.get(scope)
        if shelf is None:
            return [None] * len(keys)
        self._shelves.move_to_end(scope)
        return shelf.find(keys)

    def forget(self, bundle: Bundle, place: int | None = None) -> None:
        """That a row lies in an object, or any of its rows."""
        shelf = self._shelves.get(bundle.scope)
        if shelf is not None:
            shelf.forget(bundle, place)


class _Shelf:
    """The rows of one scope."""

    def __init__(self) -> None:
        self.bundles: list[Bundle | None] = []  # by their numbers; None where one is gone
        self.is_looked_through = False
        self._index = IdIndex()
        self._where: _Ints = np.empty((0, 2), np.int64)  # number of the object, place in it

    def __len__(self) -> int:
        return len(self._index)

    def add(self, bundle: Bundle, keys: Sequence[bytes]) -> None:
        number = len(self.bundles)
        self.bundles.append(bundle)
        ids, firsts = np.unique(_ids(keys), return_index=True)
        slots = self._index.find(ids)
        new = slots < 0
        slots[new] = len(self._index) + np.arange(int(new.sum()))
        self._index.add(ids[new])
        self._grow()
        # What is known to lie elsewhere stays there.
        lost = new | (self._where[slots, 0] == _NOWHERE)
        self._where[slots[lost]] = np.stack([np.full(int(lost.sum()), number), firsts[lost]], axis=1)

    def find(self, keys: Sequence[bytes]) -> list[Place | None]:
        slots = self._index.find(_ids(keys))
        there = slots >= 0
        where = np.full((len(keys), 2), _NOWHERE, np.int64)
        where[there] = self._where[slots[there]]
        bundles = ((None if number == _NOWHERE else self.bundles[number], place) for number, place in where.tolist())
        return [None if bundle is None else (bundle, place) for bundle, place in bundles]

    def forget(self, bundle: Bundle, place: int | None) -> None:
        if bundle not in self.bundles:  # it went before its rows were known
            return
        number = self.bundles.index(bundle)
        rows = self._where[: len(self._index)]
        is_there = rows[:, 0] == number
        if place is None:
            self.bundles[number] = None  # should it come back, its rows are learned again
        else:
            is_there &= rows[:, 1] == place
        rows[is_there, 0] = _NOWHERE

    def _grow(self) -> None:
        if len(self._index) > len(self._where):
            where = np.full((2 * len(self._index), 2), _NOWHERE, np.int64)
            where[: len(self._where)] = self._where
            self._where = where


def _ids(keys: Sequence[bytes]) -> _Ints:
    # Half of a key finds it; two rows that share a half are told apart by their checksums, which hold the whole key.
    halves = np.frombuffer(b"".join(keys), np.int64).reshape(len(keys), 2)[:, 0]
    return np.asarray(halves & np.iinfo(np.int64).max)
