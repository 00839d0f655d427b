"""A hash table from ids to slots, looked up for whole arrays at a time. Pure."""

import numpy as np
import numpy.typing as npt

__all__ = ("IdIndex",)

_Ids = npt.NDArray[np.int64]


class IdIndex:
    """Slots 0, 1, 2 ... of ids in the order of adding. Ids are not negative.

    Open addressing with linear probing (Knuth, The Art of Computer Programming 3, section 6.4, algorithm L)
    after multiplicative hashing, never more than half full.
    """

    _SMALLEST_BITS = 1

    def __init__(self) -> None:
        self._count = 0
        self._make(self._SMALLEST_BITS)

    def __len__(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        """Taken by it."""
        return self._keys.nbytes + self._slots.nbytes if self._count else 0

    def find(self, ids: _Ids) -> _Ids:
        """The slot of each id, -1 where it was not added."""
        slots = np.full(len(ids), -1, np.int64)
        left = np.arange(len(ids))
        places = self._home(ids)
        while len(left):
            keys = self._keys[places]
            same = keys == ids[left]
            slots[left[same]] = self._slots[places[same]]
            further = ~same & (keys >= 0)
            left, places = left[further], (places[further] + 1) & self._mask
        return slots

    def add(self, ids: _Ids) -> None:
        """Add ids that are not there yet, each once."""
        slots = np.arange(self._count, self._count + len(ids))
        self._count += len(ids)
        bits = max(self._SMALLEST_BITS, (2 * self._count - 1).bit_length())
        if bits > self._bits:
            keys, old = self._keys, self._slots
            self._make(bits)
            self._insert(keys[keys >= 0], old[keys >= 0])
        self._insert(ids, slots)

    def _make(self, bits: int) -> None:
        self._bits = bits
        self._mask = (1 << bits) - 1
        self._keys = np.full(1 << bits, -1, np.int64)
        self._slots = np.empty(1 << bits, np.int64)

    def _insert(self, ids: _Ids, slots: _Ids) -> None:
        places = self._home(ids)
        while len(ids):
            free = self._keys[places] < 0
            self._keys[places[free]] = ids[free]  # of several ids at one place the last one written stays
            won = free & (self._keys[places] == ids)
            self._slots[places[won]] = slots[won]
            ids, slots, places = ids[~won], slots[~won], (places[~won] + 1) & self._mask

    def _home(self, ids: _Ids) -> _Ids:
        mixed = ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        return (mixed >> np.uint64(64 - self._bits)).astype(np.int64)
