"""Finds a job's features by sample id: in memory first, on disk next."""

from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from frostline.cache.keys import Scope, row_keys
from frostline.cache.local.disk import FeatureStore, Keys
from frostline.cache.local.memory import FeatureCache
from frostline.cache.rows import RowLayout, Tensors
from frostline.core import SampleTable

__all__ = ("CachedIn", "DiskCache", "RowNames", "TieredCache")

_Ids = npt.NDArray[np.int64]
_Mask = npt.NDArray[np.bool_]


class RowNames:
    """Names of samples by their id.

    Args:
        samples: that may be asked for; those whose version nobody knows have no name.
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
        store: where they are kept.
        scope: what they depend on.
        names: of the samples; those without one are not kept.
    """

    def __init__(self, store: FeatureStore, scope: Scope, names: RowNames) -> None:
        self._store = store
        self._scope = scope.digest
        self._layout = RowLayout(shapes=scope.shapes, dtypes=scope.dtypes)
        self._names = names

    def contains(self, ids: _Ids) -> _Mask:
        """Which of them are kept; one that is may be gone, or found damaged, when it is read."""
        return self._store.contains(self._scope, self._names.of(ids))

    def get(self, ids: _Ids) -> tuple[_Mask, Tensors]:
        """Which of them were found, and the tensors of those, in the ids' order."""
        tensors = self._layout.empty(len(ids))
        found = self._store.get_into(self._scope, self._names.of(ids), self._layout, tensors)
        return found, tensors if found.all() else tuple(tensor[found] for tensor in tensors)

    def put(self, ids: _Ids, tensors: Tensors) -> int:
        """Keep rows as far as there is room, and say how many were added."""
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
    def nowhere(cls, count: int) -> Self:
        """Of features that are not kept."""
        return cls(rows=np.full(count, -1, np.int64), is_on_disk=np.zeros(count, np.bool_))


class TieredCache:
    """A cache in memory with one on disk behind it. Safe for threads.

    Args:
        memory: takes what is put and what is found on disk, as far as it has room.
        disk: takes what is put; None for memory alone.
    """

    def __init__(self, memory: FeatureCache, disk: DiskCache | None) -> None:
        self.memory = memory
        self._disk = disk

    @property
    def row_bytes(self) -> int:
        """Of the features of a sample."""
        scope = self.memory.scope
        return RowLayout(shapes=scope.shapes, dtypes=scope.dtypes).nbytes

    @property
    def has_room(self) -> bool:
        """What is put now is likely to be kept: nothing was turned away yet, or there is a disk."""
        return self._disk is not None or not self.memory.statistics().turned_away

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
        """Keep rows in both, as far as there is room."""
        self.memory.put(ids, tensors)
        if self._disk is not None:
            self._disk.put(ids, tensors)
