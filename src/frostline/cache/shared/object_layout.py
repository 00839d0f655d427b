"""Decides how rows lie together in one shared object, what it is called, and which bytes of it are asked for. Pure."""

import hashlib
import re
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Self

from frostline.cache.rows import Bytes
from frostline.core.checksums import crc32

__all__ = ("KEY_BYTES", "MARK", "PackedObject", "Row", "WriteBuffer", "keys_of", "mark_of", "pack_rows", "runs_of")

KEY_BYTES = 16
"""Of a row's name."""

MARK = "used"
"""Name of the object that says by its age when the rows beside it were last used."""

Row = tuple[bytes, bytes]
"""A row's name and its value, as ``rows.sealed`` makes it."""

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
        rows: how many.
        value_bytes: bytes of each, with its checksum.
        digest: digest of the object's bytes, in hexadecimal digits.
    """

    scope: bytes
    rows: int
    value_bytes: int
    digest: str

    @classmethod
    def named(cls, name: str, size: int) -> Self | None:
        """What an entry of a listing names; None where it is none of these, or not whole."""
        found = _NAME.fullmatch(name)
        if found is None:
            return None
        scope, rows, value_bytes, digest = found.groups()
        packed = cls(scope=bytes.fromhex(scope), rows=int(rows, 16), value_bytes=int(value_bytes, 16), digest=digest)
        return packed if packed.nbytes == size else None

    @property
    def name(self) -> str:
        """Of the object, under the root of the cache."""
        return f"{self.scope.hex()}/{self.rows:x}-{self.value_bytes:x}-{self.digest}.{_FORMAT}"

    @property
    def head_bytes(self) -> int:
        """Of the keys and their checksum, which come first."""
        return self.rows * KEY_BYTES + _CHECKSUM_BYTES

    @property
    def nbytes(self) -> int:
        """Of the object."""
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
    keys, checksum = bytes(view[: packed.rows * KEY_BYTES]), view[packed.rows * KEY_BYTES :]
    if len(head) != packed.head_bytes or checksum != _checksum(packed.scope, keys):
        return None
    return [keys[start : start + KEY_BYTES] for start in range(0, len(keys), KEY_BYTES)]


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
        bundle_bytes: so many make an object.
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
        """Take rows, none of which waits twice, and say how many found no room."""
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
        """After how long rows will have waited long enough; None where none wait."""
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
