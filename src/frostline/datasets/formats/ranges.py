"""Reads places of one object that mostly follow each other, such as headers, by ranges of a fitting size."""

from frostline.errors import DataError
from frostline.stores.base.protocols import Entry, Versioned, is_other_version

__all__ = ("ObjectRanges",)

# Reading on through what is not needed costs less than another round trip, up to about here.
_GAP_BYTES = 64 << 10
# A header with a name and a small member or two.
_MIN_BYTES = 8 << 10
_MAX_BYTES = 1 << 20
# Headers with long names, and contents that are looked into, are far smaller.
_LONGEST_BYTES = 16 << 20


class ObjectRanges:
    """As much of a file as ``tarfile`` needs of one. For one thread.

    Args:
        store: store that holds the object.
        entry: its entry in the store's listing.
    """

    def __init__(self, store: Versioned, entry: Entry) -> None:
        self._store = store
        self._entry = entry
        self._place = 0
        self._start = 0
        self._held = b""
        self._window = _MIN_BYTES

    def tell(self) -> int:
        """Where reading goes on."""
        return self._place

    def seek(self, place: int) -> int:
        """Go on from a place."""
        self._place = place
        return place

    def read(self, size: int) -> bytes:
        """The bytes from here on; raises what ``at`` raises."""
        data = self.at(self._place, size)
        self._place += len(data)
        return data

    def at(self, place: int, size: int) -> bytes:
        """The bytes at a place, or as many as the file has.

        Raises:
            DataError: they are more than any header has, or the file has changed since it was listed.
            StoreError: the store failed.
        """
        if size > _LONGEST_BYTES:
            raise DataError(f"{self._entry.object} has a header of {size} bytes at byte {place}: it is damaged")
        size = min(size, self._entry.size - place)
        if size <= 0:
            return b""
        if not self._start <= place <= place + size <= self._start + len(self._held):
            self._fetch(place, size)
        return self._held[place - self._start : place - self._start + size]

    def _fetch(self, place: int, size: int) -> None:
        is_near = 0 <= place - self._start - len(self._held) + size < _GAP_BYTES
        self._window = min(2 * self._window, _MAX_BYTES) if is_near else _MIN_BYTES
        length = min(max(size, self._window), self._entry.size - place)
        data, version = self._store.read_version(self._entry.object, place, length)
        if is_other_version(self._entry.etag, version):
            raise DataError(f"{self._entry.object} changed while it was read: ask again when nobody writes to it")
        self._start, self._held = place, bytes(data)
