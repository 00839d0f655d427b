"""Keeps features at the trainer between epochs, bounded in bytes."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from frostline.cache.id_index import IdIndex
from frostline.cache.keys import Scope

__all__ = ("CacheStatistics", "FeatureCache")

Tensors = tuple[npt.NDArray[np.generic], ...]
_Ids = npt.NDArray[np.int64]
_Mask = npt.NDArray[np.bool_]

# What the index takes for one row at its emptiest, just after it doubled: four places of a key and a slot.
_INDEX_BYTES_PER_ROW = 64
# Small enough to waste little on a small data set, large enough that growing is rare.
_SLAB_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStatistics:
    """What the cache did so far.

    Attributes:
        rows: kept.
        bytes: taken by them and by their index; at ``budget_bytes`` nothing more is kept: raise ``cache_bytes``.
        budget_bytes: the most it may take.
        hits: rows that ``get`` found.
        misses: rows that ``get`` did not find.
        turned_away: rows that did not fit.
    """

    rows: int
    bytes: int
    budget_bytes: int
    hits: int
    misses: int
    turned_away: int


class FeatureCache:
    """Features by sample id, for one scope. Safe for several threads.

    What came first stays; when the cache is full, later rows are not kept. An epoch reads every sample once
    in a new order, so all samples are equally likely to be wanted next: with room for a share of them this
    rule hits exactly that share, while least-recently-used drops rows before they are wanted again (Mohan et
    al., "Analyzing and Mitigating Data Stalls in DNN Training", PVLDB 14(5), 2021: the MinIO cache).

    Rows lie in slabs that are made as they are needed and never moved.

    Args:
        scope: what the features depend on; who uses the cache compares it first.
        budget_bytes: most bytes for slabs and index; 0 keeps nothing.
    """

    def __init__(self, scope: Scope, budget_bytes: int) -> None:
        self.scope = scope
        self._budget_bytes = budget_bytes
        self._lock = threading.Lock()
        self._index = IdIndex()
        self._layout: tuple[tuple[tuple[int, ...], np.dtype[np.generic]], ...] = ()
        self._slabs: list[Tensors] = []
        self._slab_rows = 0
        self._capacity = 0
        self._hits = 0
        self._misses = 0
        self._turned_away = 0

    def __contains__(self, id_: int) -> bool:
        return bool(self.contains(np.array([id_], np.int64))[0])

    def __len__(self) -> int:
        return len(self._index)

    def contains(self, ids: _Ids) -> _Mask:
        """Which of the ids are kept: ``bool[n]`` for ``int64[n]``. What is kept stays kept."""
        with self._lock:
            return self._index.find(ids) >= 0

    def put(self, ids: _Ids, tensors: Tensors) -> int:
        """Keep rows as far as there is room; rows already kept stay as they are.

        Args:
            ids: ``int64[n]``, not negative.
            tensors: arrays ``[n, ...]``; copied.

        Returns:
            How many rows were added.

        Raises:
            ValueError: a tensor's shape or type differs from the rows before it.
        """
        with self._lock:
            self._fit(tensors)
            _, first = np.unique(ids, return_index=True)
            rows = np.sort(first)
            rows = rows[self._index.find(ids[rows]) < 0]
            kept = rows[: self._capacity - len(self._index)]
            self._turned_away += len(rows) - len(kept)
            slots = np.arange(len(self._index), len(self._index) + len(kept))
            self._write(slots, kept, tensors)
            self._index.add(ids[kept])
            return len(kept)

    def get(self, ids: _Ids) -> tuple[_Mask, Tensors]:
        """Look rows up.

        Returns:
            ``bool[n]``, which ids were found; and the tensors of those, in the ids' order, the caller's own.
            No tensors at all where nothing was ever kept.
        """
        with self._lock:
            slots = self._index.find(ids)
            found = slots >= 0
            self._hits += int(found.sum())
            self._misses += int(len(ids) - found.sum())
            return found, self._read(slots[found])

    def statistics(self) -> CacheStatistics:
        """What the cache did so far."""
        with self._lock:
            slabs = sum(tensor.nbytes for slab in self._slabs for tensor in slab)
            return CacheStatistics(
                rows=len(self._index),
                bytes=slabs + self._index.nbytes,
                budget_bytes=self._budget_bytes,
                hits=self._hits,
                misses=self._misses,
                turned_away=self._turned_away,
            )

    def _fit(self, tensors: Tensors) -> None:
        """Learn the rows' layout from the first ones, and hold later ones to it."""
        layout = tuple((tensor.shape[1:], tensor.dtype) for tensor in tensors)
        if not self._layout:
            self._layout = layout
            row_bytes = sum(int(np.prod(shape)) * dtype.itemsize for shape, dtype in layout)
            self._slab_rows = max(1, _SLAB_BYTES // max(1, row_bytes))
            self._capacity = self._budget_bytes // (row_bytes + _INDEX_BYTES_PER_ROW)
        if layout != self._layout:
            raise ValueError(f"a cache of rows like {self._layout} cannot keep rows like {layout}")

    def _write(self, slots: _Ids, rows: _Ids, tensors: Tensors) -> None:
        for number, span in _by_slab(slots, self._slab_rows):
            if number == len(self._slabs):
                self._slabs.append(self._new_slab(number))
            places = slots[span] - number * self._slab_rows
            for slab, tensor in zip(self._slabs[number], tensors, strict=True):
                slab[places[0] : places[-1] + 1] = tensor[rows[span]]

    def _new_slab(self, number: int) -> Tensors:
        rows = min(self._slab_rows, self._capacity - number * self._slab_rows)
        return tuple(np.empty((rows, *shape), dtype) for shape, dtype in self._layout)

    def _read(self, slots: _Ids) -> Tensors:
        out = tuple(np.empty((len(slots), *shape), dtype) for shape, dtype in self._layout)
        numbers = slots // self._slab_rows if len(slots) else slots
        for number in np.unique(numbers).tolist():
            rows = np.flatnonzero(numbers == number)
            for target, slab in zip(out, self._slabs[number], strict=True):
                target[rows] = slab[slots[rows] - number * self._slab_rows]
        return out


def _by_slab(slots: _Ids, slab_rows: int) -> Sequence[tuple[int, slice]]:
    """Neighbouring slots, ascending, divided at the slabs' ends: the slab's number and which of the slots."""
    if len(slots) == 0:
        return ()
    first, last = int(slots[0]), int(slots[-1])
    spans = []
    for number in range(first // slab_rows, last // slab_rows + 1):
        start = max(first, number * slab_rows)
        stop = min(last + 1, (number + 1) * slab_rows)
        spans.append((number, slice(start - first, stop - first)))
    return spans
