"""Decides how features lie in shared objects, in which one each row is, and which objects are evicted. Pure."""

import hashlib
import re
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Generic, Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt

from frostline.cache.keys import Bytes, IdIndex
from frostline.core.system import crc32

__all__ = (
    "MARK",
    "Aged",
    "ObjectIndex",
    "PackedObject",
    "Row",
    "RowLocation",
    "WriteBuffer",
    "keys_of",
    "mark_of",
    "pack_rows",
    "runs_of",
    "surplus",
)


_KEY_BYTES = 16
"""Of a row's name."""

MARK = "used"
"""Name of the object that says by its age when the rows beside it were last used."""

Row = tuple[bytes, bytes]
"""A row's name and its value, as ``keys.add_checksum`` makes it."""

# Part of every object's name: another format has another.
_FORMAT = "rows1"
_CHECKSUM_BYTES = 4
_NAME = re.compile(rf"([0-9a-f]{{64}})/([0-9a-f]{{1,8}})-([0-9a-f]{{1,16}})-([0-9a-f]{{32}})\.{_FORMAT}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedObject:
    """An object of rows of one scope: their keys, a checksum of these, and their values, all of one length.

    Its name says what lies where in it, and holds a digest of its bytes, so that it never changes.

    Attributes:
        scope: digest of what the rows depend on.
        rows: the number of rows.
        value_bytes: bytes of each, with its checksum.
        digest: digest of the object's bytes, in hexadecimal digits.
    """

    scope: bytes
    rows: int
    value_bytes: int
    digest: str

    @classmethod
    def parse(cls, name: str, size: int) -> Self | None:
        """What an entry of a listing names; None where it is none of these, or not whole."""
        found = _NAME.fullmatch(name)
        if found is None:
            return None
        scope, rows, value_bytes, digest = found.groups()
        packed = cls(scope=bytes.fromhex(scope), rows=int(rows, 16), value_bytes=int(value_bytes, 16), digest=digest)
        return packed if packed.nbytes == size else None

    @property
    def name(self) -> str:
        """The name of the object, under the root of the cache."""
        return f"{self.scope.hex()}/{self.rows:x}-{self.value_bytes:x}-{self.digest}.{_FORMAT}"

    @property
    def head_bytes(self) -> int:
        """Bytes of the keys and their checksum, which come first."""
        return self.rows * _KEY_BYTES + _CHECKSUM_BYTES

    @property
    def nbytes(self) -> int:
        """Bytes of the object."""
        return self.head_bytes + self.rows * self.value_bytes

    def offset(self, place: int) -> int:
        """Where the value of a row begins."""
        return self.head_bytes + place * self.value_bytes


def pack_rows(scope: bytes, rows: Sequence[Row]) -> tuple[PackedObject, bytes]:
    """Put rows, whose values are of one length, into one object."""
    keys = b"".join(key for key, _ in rows)
    data = b"".join((keys, _checksum(scope, keys), *(value for _, value in rows)))
    digest = hashlib.blake2b(data, digest_size=16).hexdigest()
    return PackedObject(scope=scope, rows=len(rows), value_bytes=len(rows[0][1]), digest=digest), data


def mark_of(scope: bytes) -> str:
    """The object that is written anew now and then while somebody uses the rows of a scope."""
    return f"{scope.hex()}/{MARK}"


def keys_of(packed: PackedObject, head: Bytes) -> list[bytes] | None:
    """The keys in an object's first bytes; None where those are not what was written."""
    view = memoryview(head)
    keys, checksum = bytes(view[: packed.rows * _KEY_BYTES]), view[packed.rows * _KEY_BYTES :]
    if len(head) != packed.head_bytes or checksum != _checksum(packed.scope, keys):
        return None
    return [keys[start : start + _KEY_BYTES] for start in range(0, len(keys), _KEY_BYTES)]


def runs_of(places: Sequence[int]) -> list[range]:
    """Places of rows within an object, each once, joined where they are neighbours, so that one read gives them."""
    found: list[range] = []
    for place in sorted(places):
        if found and found[-1].stop == place:
            found[-1] = range(found[-1].start, place + 1)
        else:
            found.append(range(place, place + 1))
    return found


def _checksum(scope: bytes, keys: bytes) -> bytes:
    return crc32(keys, crc32(scope)).to_bytes(_CHECKSUM_BYTES, "little")


class WriteBuffer:
    """Rows that wait to be written. Not safe for threads.

    Args:
        max_bytes: maximum bytes of all that wait; what comes beyond is not taken.
        bundle_bytes: number of bytes that make an object.
        linger_s: rows wait no longer than this for others.
    """

    def __init__(self, *, max_bytes: int, bundle_bytes: int, linger_s: float) -> None:
        self._max_bytes = max_bytes
        self._bundle_bytes = bundle_bytes
        self._linger_s = linger_s
        self._waiting: OrderedDict[bytes, _PendingRows] = OrderedDict()  # the one that has waited longest first
        self._bytes = 0

    def __len__(self) -> int:
        return sum(len(pile.rows) for pile in self._waiting.values())

    def add(self, scope: bytes, rows: Sequence[Row], now_s: float) -> int:
        """Take rows, none of which waits twice, and say how many found no space."""
        for count, (key, value) in enumerate(rows):
            if self._bytes + len(value) > self._max_bytes:
                return len(rows) - count
            pile = self._waiting.setdefault(scope, _PendingRows(since_s=now_s))
            if key in pile.rows:
                continue
            pile.rows[key] = value
            pile.nbytes += len(value)
            self._bytes += len(value)
        return 0

    def take(self, now_s: float, *, all: bool = False) -> tuple[bytes, list[Row]] | None:
        """The rows of one object, if there are enough of a scope or they waited long enough, or in any case."""
        for scope, pile in self._waiting.items():
            if all or pile.nbytes >= self._bundle_bytes or now_s >= pile.since_s + self._linger_s:
                return scope, self._taken(scope, pile, now_s)
        return None

    def due_in_s(self, now_s: float) -> float | None:
        """Seconds until rows will have waited long enough; None where none wait."""
        first = next(iter(self._waiting.values()), None)
        return None if first is None else max(0.0, first.since_s + self._linger_s - now_s)

    def _taken(self, scope: bytes, pile: "_PendingRows", now_s: float) -> list[Row]:
        each = max(1, pile.nbytes // max(1, len(pile.rows)))
        keys = list(islice(pile.rows, max(1, self._bundle_bytes // each)))
        rows = [(key, pile.rows.pop(key)) for key in keys]
        nbytes = sum(len(value) for _, value in rows)
        pile.nbytes -= nbytes
        self._bytes -= nbytes
        del self._waiting[scope]
        if pile.rows:
            pile.since_s = now_s
            self._waiting[scope] = pile
        return rows


class _PendingRows:
    """The rows of one scope, and since when the first of them waits."""

    def __init__(self, since_s: float) -> None:
        self.rows: dict[bytes, bytes] = {}
        self.nbytes = 0
        self.since_s = since_s


# What a row takes at most, just after the arrays doubled: four places of an id and a slot, two of where it lies.
_BYTES_PER_ROW = 96

RowLocation = tuple[PackedObject, int]
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
        """An index of as many rows as that memory holds."""
        return cls(memory_bytes // _BYTES_PER_ROW)

    def __len__(self) -> int:
        return sum(len(shelve) for shelve in self._indexes.values())

    def is_looked_through(self, scope: bytes) -> bool:
        """Whether all rows of a scope are known that were there at some time."""
        return scope in self._indexes and self._indexes[scope].is_looked_through

    def fits(self, scope: bytes, rows: int) -> bool:
        """Whether so many more rows of a scope could be remembered."""
        index = self._indexes.get(scope)
        return (0 if index is None else len(index)) + rows <= self._max_rows

    def names(self, scope: bytes) -> set[str]:
        """Names of the objects that were added."""
        index = self._indexes.get(scope)
        return set() if index is None else {packed.name for packed in index.packed_objects if packed is not None}

    def add(self, packed: PackedObject, keys: Sequence[bytes]) -> None:
        """Remember the rows of an object, in their order, if there is space for them."""
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

    def find(self, scope: bytes, keys: Sequence[bytes]) -> list[RowLocation | None]:
        """Where each row lies, None where nobody knows."""
        index = self._indexes.get(scope)
        if index is None:
            return [None] * len(keys)
        self._indexes.move_to_end(scope)
        return index.find(keys)

    def forget(self, packed: PackedObject, place: int | None = None) -> None:
        """Forget that a row lies in an object, or that any of its rows do."""
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

    def find(self, keys: Sequence[bytes]) -> list[RowLocation | None]:
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


# Less would have to be freed again for the very next objects.
_MIN_FREED_PART = 16
_OURS = re.compile(r"([0-9a-f]{64})/.+", re.DOTALL)


class Aged(Protocol):
    """An object of a listing that tells its age; see ``stores.protocols.Dated``."""

    @property
    def object(self) -> str:
        """The object's name, relative to the root."""

    @property
    def size(self) -> int:
        """The object's size in bytes."""

    @property
    def modified_s(self) -> float:
        """When it was written, in seconds."""


T = TypeVar("T", bound=Aged)


@dataclass(slots=True)
class _Folder(Generic[T]):
    """The objects of one scope.

    Attributes:
        used_s: the time when somebody last used one of its rows, or wrote some.
        packed_objects: objects with bundles of rows.
        rest: objects left by a process that was killed while writing.
        mark: objects that say when it was used.
    """

    used_s: float = 0.0
    packed_objects: list[T] = field(default_factory=list)
    rest: list[T] = field(default_factory=list)
    mark: list[T] = field(default_factory=list)


def surplus(listing: Sequence[T], *, budget_bytes: int, wanted_bytes: int, now_s: float, idle_s: float) -> list[T]:
    """What is to be removed, in this order, so that so many more bytes fit; nothing where they do, or never can.

    What somebody used within ``idle_s`` stays, and new rows are turned away, as ``cache.disk.idle_scopes`` has it and
    for its reasons. Of the others those go first whose scope was unused longest, and of a scope those that were written
    first. What does not lie in a scope's folder is left alone, but counts.

    Args:
        listing: listing of all that lies under the root.
        budget_bytes: the most that may lie there.
        wanted_bytes: bytes that are to be written.
        now_s: the time by the clock of the listing.
        idle_s: the time without use after which nobody is taken to want rows any more.
    """
    missing = sum(entry.size for entry in listing) + wanted_bytes - budget_bytes
    if missing <= 0 or wanted_bytes > budget_bytes:
        return []
    freed, removed = 0, []
    for folder in _in_turn(_folders(listing), now_s - idle_s):
        if freed >= max(missing, budget_bytes // _MIN_FREED_PART):
            break
        removed.append(folder)
        freed += folder.size
    return removed if freed >= missing else []


def _folders(listing: Sequence[T]) -> dict[str, _Folder[T]]:
    folders: dict[str, _Folder[T]] = {}
    for entry in sorted(listing, key=lambda item: (item.modified_s, item.object)):
        found = _OURS.fullmatch(entry.object)
        if found is None:
            continue
        folder = folders.setdefault(found[1], _Folder())
        if PackedObject.parse(entry.object, entry.size) is not None:
            folder.packed_objects.append(entry)
        elif entry.object == f"{found[1]}/{MARK}":
            folder.mark.append(entry)
        else:
            folder.rest.append(entry)
            continue  # nobody uses it
        folder.used_s = entry.modified_s
    return folders


def _in_turn(folders: dict[str, _Folder[T]], before_s: float) -> list[T]:
    """What may go, what is missed least first."""
    rest = [entry for folder in folders.values() for entry in folder.rest if entry.modified_s <= before_s]
    idle = sorted((folder.used_s, name, folder) for name, folder in folders.items() if folder.used_s <= before_s)
    return [*rest, *(entry for _, _, folder in idle for entry in (*folder.packed_objects, *folder.mark))]
