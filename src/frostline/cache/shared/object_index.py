"""Remembers in which shared object each row lies. Pure."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Self

import numpy as np
import numpy.typing as npt

from frostline.cache.rows import IdIndex
from frostline.cache.shared.object_layout import PackedObject

__all__ = ("ObjectIndex", "Place")

# What a row takes at most, just after the arrays doubled: four places of an id and a slot, two of where it lies.
_BYTES_PER_ROW = 96

Place = tuple[PackedObject, int]
"""An object, and which of its rows."""

# More than jobs use at a time.
_MAX_SCOPES = 1024
_NOWHERE = -1
_Ints = npt.NDArray[np.int64]


class ObjectIndex:
    """Where rows lie. Not safe for threads.

    Args:
        max_rows: maximum rows of all scopes together; beyond that, scopes that were not asked for longest are
            forgotten.
    """

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._indexes: OrderedDict[bytes, _ScopeIndex] = OrderedDict()

    @classmethod
    def within(cls, memory_bytes: int) -> Self:
        """As many as that memory holds."""
        return cls(memory_bytes // _BYTES_PER_ROW)

    def __len__(self) -> int:
        return sum(len(shelve) for shelve in self._indexes.values())

    def is_looked_through(self, scope: bytes) -> bool:
        """Whether all rows of a scope are known that were there at some time."""
        return scope in self._indexes and self._indexes[scope].is_looked_through

    def has_room(self, scope: bytes, rows: int) -> bool:
        """Whether so many more rows of a scope could be remembered."""
        index = self._indexes.get(scope)
        return (0 if index is None else len(index)) + rows <= self._max_rows

    def names(self, scope: bytes) -> set[str]:
        """Of the objects that were added."""
        index = self._indexes.get(scope)
        return set() if index is None else {packed.name for packed in index.packed_objects if packed is not None}

    def add(self, packed: PackedObject, keys: Sequence[bytes]) -> None:
        """Remember the rows of an object, in their order, if there is room for them."""
        index = self._indexes.setdefault(packed.scope, _ScopeIndex())
        self._indexes.move_to_end(packed.scope)
        while len(self) + len(keys) > self._max_rows and len(self._indexes) > 1:
            self._indexes.popitem(last=False)
        if len(self) + len(keys) <= self._max_rows:
            index.add(packed, keys)

    def note(self, scope: bytes) -> None:
        """Remember that a scope was looked through, though it may have no rows."""
        self._indexes.setdefault(scope, _ScopeIndex()).is_looked_through = True
        self._indexes.move_to_end(scope)
        while len(self._indexes) > _MAX_SCOPES:
            self._indexes.popitem(last=False)

    def find(self, scope: bytes, keys: Sequence[bytes]) -> list[Place | None]:
        """Where each row lies, None where nobody knows."""
        index = self._indexes.get(scope)
        if index is None:
            return [None] * len(keys)
        self._indexes.move_to_end(scope)
        return index.find(keys)

    def forget(self, packed: PackedObject, place: int | None = None) -> None:
        """That a row lies in an object, or any of its rows."""
        index = self._indexes.get(packed.scope)
        if index is not None:
            index.forget(packed, place)


class _ScopeIndex:
    """The rows of one scope."""

    def __init__(self) -> None:
        self.packed_objects: list[PackedObject | None] = []  # by their numbers; None where one is gone
        self.is_looked_through = False
        self._index = IdIndex()
        self._where: _Ints = np.empty((0, 2), np.int64)  # number of the object, place in it

    def __len__(self) -> int:
        return len(self._index)

    def add(self, packed: PackedObject, keys: Sequence[bytes]) -> None:
        number = len(self.packed_objects)
        self.packed_objects.append(packed)
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
        packed_objects = (
            (None if number == _NOWHERE else self.packed_objects[number], place) for number, place in where.tolist()
        )
        return [None if packed is None else (packed, place) for packed, place in packed_objects]

    def forget(self, packed: PackedObject, place: int | None) -> None:
        if packed not in self.packed_objects:  # it went before its rows were known
            return
        number = self.packed_objects.index(packed)
        rows = self._where[: len(self._index)]
        is_there = rows[:, 0] == number
        if place is None:
            self.packed_objects[number] = None  # should it come back, its rows are learned again
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
