"""Decides what names a feature, and how a sample's features lie in one value with its checksum. Pure."""

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from frostline.core import Samples, Targets, View
from frostline.core.nouns import array_dtype
from frostline.core.system import crc32

__all__ = (
    "Bytes",
    "IdIndex",
    "RowLayout",
    "Scope",
    "Tensors",
    "add_checksum",
    "fill",
    "row_keys",
    "verify_checksum",
)


# Part of every digest: raise it whenever the same inputs would give other numbers.
_RULE = "frostline features 1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """What features depend on beside the sample. Features of another scope are other numbers.

    Attributes:
        data: the canonical URL of the data set's root: what one may not read has another name.
        prefix: digest of the prefix; empty where there is none.
        cut: the number.
        preprocess: digest of the preprocessing, which includes the decoder's version.
        engine: engine that computes them, with its version and hardware, which decide their last bits.
        batch_rows: rows of each of its runs, which decide them too; 0 where nothing runs.
        shapes: shapes of the tensors that cross the cut, of one sample.
        dtypes: dtypes of the same tensors.
        view: the random view; None where no step is random.
    """

    data: str
    prefix: str
    cut: int
    preprocess: str
    engine: str
    batch_rows: int = 0
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    view: View | None = None

    @property
    def digest(self) -> bytes:
        """32 bytes."""
        values = {**asdict(self), "rule": _RULE}
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).digest()


def row_keys(samples: Samples) -> list[bytes | None]:
    """16 bytes for each sample, from its id, its place and the version of its object.

    Random steps are seeded by the id, so it belongs to the name. A sample whose object's version nobody knows has no
    name: its features could be those of other bytes. Where it has a mask, which is kept with its features, place and
    version of the mask belong to the name too.
    """
    if not len(samples.versions):
        return [None] * len(samples)
    ids, offsets, lengths = (column.tolist() for column in (samples.ids, samples.offsets, samples.lengths))
    places = zip(ids, samples.objects, offsets, lengths, samples.versions, strict=True)
    if samples.targets is None:
        return [_row_key(place) if place[-1] else None for place in places]
    masks = _masks(samples.targets)
    return [
        _row_key(place + mask) if place[-1] and (mask[-1] or not mask[0]) else None
        for place, mask in zip(places, masks, strict=True)
    ]


def _masks(targets: Targets) -> Iterable[tuple[object, ...]]:
    return zip(targets.objects, targets.offsets.tolist(), targets.lengths.tolist(), targets.versions, strict=True)


def _row_key(place: Sequence[object]) -> bytes:
    # Neither a name nor a version holds a NUL, so that the parts cannot run into each other.
    return hashlib.blake2b("\0".join(map(str, place)).encode(), digest_size=16).digest()


Tensors = tuple[npt.NDArray[np.generic], ...]
Bytes = bytes | memoryview

_CHECKSUM_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLayout:
    """The tensors of one sample, one after another."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(self.shapes) != len(self.dtypes):
            raise ValueError(f"{len(self.shapes)} shapes and {len(self.dtypes)} dtypes make no layout")

    @classmethod
    def of(cls, tensors: Tensors) -> Self:
        """The layout of the rows of ``[n, ...]`` arrays."""
        return cls(
            shapes=tuple(tensor.shape[1:] for tensor in tensors), dtypes=tuple(tensor.dtype.name for tensor in tensors)
        )

    @property
    def nbytes(self) -> int:
        """Bytes of a row."""
        return sum(self._sizes)

    def empty(self, rows: int) -> Tensors:
        """Arrays for so many rows, not written yet."""
        pairs = zip(self.shapes, self.dtypes, strict=True)
        return tuple(np.empty((rows, *shape), array_dtype(dtype)) for shape, dtype in pairs)

    def bodies(self, tensors: Tensors) -> Iterator[tuple[memoryview, ...]]:
        """Each row's bytes, a piece for each tensor, viewed where the tensor lies in one piece."""
        columns = [_as_bytes(tensor, size) for tensor, size in zip(tensors, self._sizes, strict=True)]
        return zip(*columns, strict=True) if columns else iter(())

    def views(self, tensors: Tensors) -> list[npt.NDArray[np.uint8]]:
        """The bytes of arrays that ``empty`` made, ``uint8[n, size]`` each, for ``fill``."""
        return [
            tensor.reshape(len(tensor), math.prod(tensor.shape[1:])).view(np.uint8) for tensor in tensors if len(tensor)
        ]

    @property
    def _sizes(self) -> list[int]:
        pairs = zip(self.shapes, self.dtypes, strict=True)
        return [math.prod(shape) * array_dtype(dtype).itemsize for shape, dtype in pairs]


def fill(views: Sequence[npt.NDArray[np.uint8]], place: int, body: memoryview) -> None:
    """Write a row's bytes to its place."""
    start = 0
    for view in views:
        size = view.shape[1]
        view[place] = np.frombuffer(body, np.uint8, size, start)
        start += size


def add_checksum(key: bytes, pieces: Sequence[Bytes]) -> bytes:
    """A value that says whose it is and whether it is whole: the CRC-32 of key and pieces, and the pieces."""
    checksum = crc32(key)
    for piece in pieces:
        checksum = crc32(piece, checksum)
    return b"".join((checksum.to_bytes(_CHECKSUM_BYTES, "little"), *pieces))


def verify_checksum(key: bytes, value: Bytes, nbytes: int) -> memoryview | None:
    """The bytes that ``add_checksum`` put in for that key; None where they are others, or not so many."""
    view = memoryview(value)
    body = view[_CHECKSUM_BYTES:]
    if len(body) != nbytes:
        return None
    return body if crc32(body, crc32(key)) == int.from_bytes(view[:_CHECKSUM_BYTES], "little") else None


def _as_bytes(tensor: npt.NDArray[np.generic], size: int) -> Iterator[memoryview]:
    whole = np.ascontiguousarray(tensor)
    flat = whole.reshape(-1).view(np.uint8).data
    return (flat[row * size : (row + 1) * size] for row in range(len(whole)))


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
