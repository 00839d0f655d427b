"""Keeps features at the trainer between epochs, bounded in bytes."""

import math
import mmap
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from frostline.cache.disk import FeatureStore, Keys
from frostline.cache.keys import IdIndex, RowLayout, Scope, Tensors, row_keys
from frostline.core import SampleTable
from frostline.core.errors import SettingError
from frostline.core.nouns import finite_rows

__all__ = ("CacheStatistics", "CachedIn", "DiskCache", "FeatureCache", "RowNames", "TieredCache")

_Ids = npt.NDArray[np.int64]
_Mask = npt.NDArray[np.bool_]

# What the index takes for one row at its emptiest, just after it doubled: four places of a key and a slot.
_INDEX_BYTES_PER_ROW = 64
# A budget may be larger than the machine where the rows are few (mmap(2); Python names it from 3.12 on).
_UNRESERVED = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStatistics:
    """What the cache did so far.

    Attributes:
        rows: the rows, kept.
        bytes: the bytes, taken by them and by their index; at ``budget_bytes`` nothing more is kept: raise
            ``cache_bytes``.
        budget_bytes: the most it may take.
        hits: rows that ``get`` found.
        misses: rows that ``get`` did not find.
        rejected: rows that did not fit.
    """

    rows: int
    bytes: int
    budget_bytes: int
    hits: int
    misses: int
    rejected: int


class FeatureCache:
    """Features by sample id, for one scope. Safe for several threads.

    What came first stays; when the cache is full, later rows are not kept. An epoch reads every sample once
    in a new order, so all samples are equally likely to be wanted next: with space for a share of them this
    rule hits exactly that share, while least-recently-used drops rows before they are wanted again (Mohan et
    al., "Analyzing and Mitigating Data Stalls in DNN Training", PVLDB 14(5), 2021: the MinIO cache).

    Rows lie in one table for each tensor, mapped whole at the first row; memory is taken as they are written. A row
    that is there never moves or changes, so that it can be copied out of the table by whoever knows its number.

    Args:
        scope: dependencies of the features; users of the cache compare it first.
        budget_bytes: the most bytes for tables and index; 0 keeps nothing.
    """

    def __init__(self, scope: Scope, budget_bytes: int) -> None:
        self.scope = scope
        self._budget_bytes = self._bound_bytes = budget_bytes
        self._lock = threading.Lock()
        self._index = IdIndex()
        self._layout: tuple[tuple[tuple[int, ...], np.dtype[np.generic]], ...] = ()
        self._tables: Tensors = ()
        self._row_bytes = 0
        self._capacity = 0
        self._hits = 0
        self._misses = 0
        self._turned_away = 0

    def __contains__(self, id_: int) -> bool:
        return bool(self.contains(np.array([id_], np.int64))[0])

    def __len__(self) -> int:
        return len(self._index)

    @property
    def tables(self) -> Tensors:
        """Arrays ``[m, ...]``, of which the rows that ``find`` named hold what was put; only to be read.

        None at all where nothing was ever kept.
        """
        return self._tables

    def bound(self, nbytes: int) -> None:
        """Keep no further rows beyond so many bytes, within the budget; what is kept stays, since rows never move."""
        with self._lock:
            self._bound_bytes = nbytes

    def contains(self, ids: _Ids) -> _Mask:
        """Which of the ids are kept: ``bool[n]`` for ``int64[n]``. What is kept stays kept."""
        with self._lock:
            return self._index.find(ids) >= 0

    def find(self, ids: _Ids) -> _Ids:
        """The row of each id in the tables, -1 where it is not kept: ``int64[n]`` for ``int64[n]``."""
        with self._lock:
            rows = self._index.find(ids)
            hits = int((rows >= 0).sum())
            self._hits += hits
            self._misses += len(ids) - hits
            return rows

    def put(self, ids: _Ids, tensors: Tensors) -> int:
        """Keep rows as far as there is space; rows already kept stay as they are.

        Args:
            ids: ``int64[n]``, not negative.
            tensors: arrays ``[n, ...]``; copied.

        Returns:
            Number of rows that were added.

        Raises:
            ValueError: a tensor's shape or type differs from the rows before it.
            SettingError: the system has not so much memory.
        """
        with self._lock:
            self._fit(tensors)
            _, first = np.unique(ids, return_index=True)
            rows = np.sort(first)
            rows = rows[self._index.find(ids[rows]) < 0]
            start = len(self._index)
            bounded = self._bound_bytes // (self._row_bytes + _INDEX_BYTES_PER_ROW)
            kept = rows[: max(0, min(self._capacity, bounded) - start)]
            self._turned_away += len(rows) - len(kept)
            for table, tensor in zip(self._tables, tensors, strict=True):
                table[start : start + len(kept)] = tensor if len(kept) == len(tensor) else tensor[kept]
            self._index.add(ids[kept])
            return len(kept)

    def get(self, ids: _Ids) -> tuple[_Mask, Tensors]:
        """Look rows up.

        Returns:
            ``bool[n]``, which ids were found; and the tensors of those, in the ids' order, the caller's own.
            No tensors at all where nothing was ever kept.
        """
        rows = self.find(ids)
        found = rows >= 0
        return found, tuple(table.take(rows[found], 0) for table in self._tables)

    def statistics(self) -> CacheStatistics:
        """What the cache did so far."""
        with self._lock:
            return CacheStatistics(
                rows=len(self._index),
                bytes=len(self._index) * self._row_bytes + self._index.nbytes,
                budget_bytes=self._budget_bytes,
                hits=self._hits,
                misses=self._misses,
                rejected=self._turned_away,
            )

    def _fit(self, tensors: Tensors) -> None:
        """Learn the rows' layout from the first ones, and hold later ones to it."""
        layout = tuple((tensor.shape[1:], tensor.dtype) for tensor in tensors)
        if not self._layout:
            row_bytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in layout)
            capacity = self._budget_bytes // (row_bytes + _INDEX_BYTES_PER_ROW)
            self._tables = tuple(_mapped(capacity, shape, dtype) for shape, dtype in layout)
            self._layout, self._row_bytes, self._capacity = layout, row_bytes, capacity
        if layout != self._layout:
            raise ValueError(f"a cache of rows like {self._layout} cannot keep rows like {layout}")


def _mapped(rows: int, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> npt.NDArray[np.generic]:
    """A table that takes memory only where it is written."""
    nbytes = rows * math.prod(shape) * dtype.itemsize
    try:
        memory = mmap.mmap(-1, max(1, nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _UNRESERVED)
    except (OSError, OverflowError) as error:
        raise SettingError(
            f"this machine has not the {nbytes:,} bytes that features may take in memory: lower cache_bytes"
        ) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel may be built without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8, nbytes).view(dtype).reshape(rows, *shape)


class RowNames:
    """Names of samples by their id.

    Args:
        samples: samples that may be asked for; those whose version nobody knows have no name.
    """

    def __init__(self, samples: SampleTable) -> None:
        self._samples = samples
        ids = samples.ids
        self._order = np.argsort(ids, kind="stable")
        self._ids = ids[self._order]

    def of(self, ids: _Ids) -> Keys:
        """The name of each, None where it has none."""
        if not len(self._ids):
            return [None] * len(ids)
        places = np.minimum(np.searchsorted(self._ids, ids), len(self._ids) - 1)
        known = self._ids[places] == ids
        keys = row_keys(self._samples.take(self._order[places]))
        return [key if is_known else None for key, is_known in zip(keys, known.tolist(), strict=True)]


class DiskCache:
    """Features on disk by sample id, for one scope. Safe for threads.

    Args:
        store: the place where they are kept.
        scope: dependencies of the features.
        names: names of the samples; those without one are not kept.
    """

    def __init__(self, store: FeatureStore, scope: Scope, names: RowNames) -> None:
        self._store = store
        self._scope = scope.digest
        self._layout = RowLayout(shapes=scope.shapes, dtypes=scope.dtypes)
        self._names = names

    @property
    def rejected(self) -> int:
        """The number of rows that the cache on disk had no space for."""
        return self._store.statistics().rejected

    def contains(self, ids: _Ids) -> _Mask:
        """Which of them are kept; one that is may be gone, or found damaged, when it is read."""
        return self._store.contains(self._scope, self._names.of(ids))

    def get(self, ids: _Ids) -> tuple[_Mask, Tensors]:
        """Which of them were found, and the tensors of those, in the ids' order."""
        tensors = self._layout.empty(len(ids))
        found = self._store.get_into(self._scope, self._names.of(ids), self._layout, tensors)
        return found, tensors if found.all() else tuple(tensor[found] for tensor in tensors)

    def put(self, ids: _Ids, tensors: Tensors) -> int:
        """Keep rows as far as there is space, and say how many were added."""
        return self._store.put(self._scope, self._names.of(ids), tensors)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CachedIn:
    """Where features lie.

    Attributes:
        rows: ``int64[n]``, the row of each in the tables of the cache in memory, where it stays; -1 where it has none.
        is_on_disk: ``bool[n]``, of those that have none.
    """

    rows: _Ids
    is_on_disk: _Mask

    @classmethod
    def empty(cls, count: int) -> Self:
        """The places of features that are not kept."""
        return cls(rows=np.full(count, -1, np.int64), is_on_disk=np.zeros(count, np.bool_))


class TieredCache:
    """A cache in memory with one on disk behind it. Safe for threads.

    Args:
        memory: cache in memory, which takes what is put and what is found on disk, as far as it has space.
        disk: cache on disk, which takes what is put; None for memory alone.
    """

    def __init__(self, memory: FeatureCache, disk: DiskCache | None) -> None:
        self.memory = memory
        self._disk = disk

    @property
    def row_bytes(self) -> int:
        """Bytes of the features of a sample."""
        scope = self.memory.scope
        return RowLayout(shapes=scope.shapes, dtypes=scope.dtypes).nbytes

    @property
    def has_space(self) -> bool:
        """What is put now is likely to be kept: nothing was turned away yet, or there is a disk."""
        return self._disk is not None or not self.memory.statistics().rejected

    @property
    def rejected(self) -> int:
        """The number of rows that were put and found no space, neither in memory nor on disk."""
        rejected = self.memory.statistics().rejected
        return rejected if self._disk is None else min(rejected, self._disk.rejected)

    def find(self, ids: _Ids) -> CachedIn:
        """Where each of them lies; one on disk may be gone, or found damaged, when it is read."""
        rows = self.memory.find(ids)
        is_on_disk = np.zeros(len(ids), np.bool_)
        lacking = rows < 0
        if self._disk is not None and lacking.any():
            is_on_disk[lacking] = self._disk.contains(ids[lacking])
        return CachedIn(rows=rows, is_on_disk=is_on_disk)

    def read(self, ids: _Ids) -> tuple[_Mask, Tensors]:
        """Which of them were found on disk, and the tensors of those, in the ids' order; memory takes them too."""
        if self._disk is None:
            return np.zeros(len(ids), np.bool_), ()
        found, tensors = self._disk.get(ids)
        self.memory.put(ids[found], tensors)
        return found, tensors

    def put(self, ids: _Ids, tensors: Tensors) -> None:
        """Keep rows in both, as far as there is space, but none with Inf or NaN."""
        finite = finite_rows(tensors, len(ids), self.memory.scope.dtypes)
        if not finite.all():
            ids, tensors = ids[finite], tuple(tensor[finite] for tensor in tensors)
        self.memory.put(ids, tensors)
        if self._disk is not None:
            self._disk.put(ids, tensors)
