"""Finds where the members of a tar lie, by ranges that hold its headers, and little else where members are large."""

import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, NamedTuple, cast

from frostline.errors import DataError
from frostline.stores.base.protocols import Entry, Versioned
from frostline.stores.base.versions import is_other_version

__all__ = ("Member", "members")

# Reading on through what is not needed costs less than another round trip, up to about here.
_GAP_BYTES = 64 << 10
# A header with a name and a small member or two.
_MIN_BYTES = 8 << 10
_MAX_BYTES = 1 << 20
# Headers with long names, and contents that are looked into, are far smaller.
_LONGEST_BYTES = 16 << 20


class Member(NamedTuple):
    """A file in a tar.

    Attributes:
        name: as it stands there, without a leading ``./``.
        offset: where its bytes start.
        size: how many they are.
        contents: its bytes, where they were asked for.
    """

    name: str
    offset: int
    size: int
    contents: bytes | None


def members(store: Versioned, shard: Entry, contents_of: tuple[str, ...]) -> Iterator[Member]:
    """The plain files of a tar, in its order; links and folders are passed over.

    Names may be long in GNU's or in PAX's way, and hold any characters that UTF-8 has.

    Args:
        store: store that holds the tar.
        shard: its entry in the store's listing.
        contents_of: endings of the names whose contents are wanted.

    Raises:
        DataError: the tar is cut off, damaged, compressed, or has changed since it was listed.
        StoreError: the store failed.
    """
    ranges = _Ranges(store, shard)
    with _said(shard.object), tarfile.TarFile(fileobj=cast(IO[bytes], ranges), encoding="utf-8") as tar:
        for info in tar:
            if not info.isreg():
                continue
            if info.issparse():
                raise DataError(f"{info.name!a} in {shard.object} is a sparse file: pack the shard without --sparse")
            wanted = info.name.lower().endswith(contents_of)
            contents = ranges.at(info.offset_data, info.size) if wanted else None
            yield Member(_checked(info.name.removeprefix("./"), shard.object), info.offset_data, info.size, contents)
        # The module stops at whatever it cannot read as if that were the end.
        if not _is_end(ranges.at(tar.offset, tarfile.BLOCKSIZE)):
            raise DataError(_cut_off(shard.object))


class _Ranges:
    """As much of a file as ``tarfile`` needs of one, read by ranges of a fitting size."""

    def __init__(self, store: Versioned, shard: Entry) -> None:
        self._store = store
        self._shard = shard
        self._place = 0
        self._start = 0
        self._held = b""
        self._window = _MIN_BYTES

    def tell(self) -> int:
        return self._place

    def seek(self, place: int) -> int:
        self._place = place
        return place

    def read(self, size: int) -> bytes:
        data = self.at(self._place, size)
        self._place += len(data)
        return data

    def at(self, place: int, size: int) -> bytes:
        """The bytes at a place, or as many as the file has."""
        if size > _LONGEST_BYTES:
            raise DataError(f"{self._shard.object} has a header of {size} bytes at byte {place}: it is damaged")
        size = min(size, self._shard.size - place)
        if size <= 0:
            return b""
        if not self._start <= place <= place + size <= self._start + len(self._held):
            self._fetch(place, size)
        return self._held[place - self._start : place - self._start + size]

    def _fetch(self, place: int, size: int) -> None:
        is_near = 0 <= place - self._start - len(self._held) + size < _GAP_BYTES
        self._window = min(2 * self._window, _MAX_BYTES) if is_near else _MIN_BYTES
        length = min(max(size, self._window), self._shard.size - place)
        data, version = self._store.read_version(self._shard.object, place, length)
        if is_other_version(self._shard.etag, version):
            raise DataError(f"{self._shard.object} changed while it was read: ask again when nobody writes to it")
        self._start, self._held = place, bytes(data)


@contextmanager
def _said(shard: str) -> Iterator[None]:
    try:
        yield
    except tarfile.ReadError as error:
        if "unexpected end of data" in str(error):
            raise DataError(_cut_off(shard)) from error
        raise DataError(f"{shard} is no plain tar (compressed ones have no places to read at), or damaged") from error
    except tarfile.TarError as error:
        raise DataError(f"{shard} is damaged: make it again or take it away") from error


def _cut_off(shard: str) -> str:
    return f"{shard} is cut off or damaged: what follows its last whole member is no end of a tar; make it again"


def _is_end(block: bytes) -> bool:
    return len(block) == tarfile.BLOCKSIZE and not any(block)


def _checked(name: str, shard: str) -> str:
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{name!a} in {shard} cannot be written in UTF-8: rename it") from error
    return name
