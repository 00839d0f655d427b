"""Turns rows that come in runs into batches of an exact size: each row is copied once, into its batch's slab."""

import math
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

__all__ = ("BatchAssembler", "Column", "Columns", "Gathered", "Memory", "RowRange", "Slabs")

# What is smaller comes from the C library without a page fault.
_LARGE = 64 << 10
# Where a cache line begins; frameworks whose kernels ask for that take an array's memory as it is.
_ALIGNED = 64
# A loop holds a batch while the next one is made; what comes back beyond that is given to the system.
_MAX_IDLE = 2

_Bytes = npt.NDArray[np.uint8]


class Memory(Protocol):
    """Where batches lie."""

    def empty(self, shape: Sequence[int], dtype: np.dtype[np.generic]) -> npt.NDArray[np.generic]:
        """An array of the caller's own, contiguous and not written yet."""


class Slabs:
    """Arrays for batches. Safe for several threads.

    Large memory that comes fresh from the system is faulted in page by page, which takes longer than to fill it.
    So an array's memory comes back when the last reference to the array is gone, and not before: views of it, and
    tensors that were made from it, count. Whoever could still write into it or read it could do so with any memory
    that was freed. What is not in use goes when the slabs themselves do.

    Args:
        max_idle: arrays of one size that are kept while nobody refers to them.
    """

    def __init__(self, max_idle: int = _MAX_IDLE) -> None:
        self._max_idle = max_idle
        self._idle: dict[int, list[_Bytes]] = {}

    def empty(self, shape: Sequence[int], dtype: np.dtype[np.generic]) -> npt.NDArray[np.generic]:
        """An array of the caller's own, not written yet."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < _LARGE or dtype.hasobject:
            return np.empty(shape, dtype)
        try:
            whole = self._idle[nbytes].pop()
        except LookupError:
            whole = _aligned(nbytes)
        return np.asarray(_Lent(whole, self)).view(dtype).reshape(shape)

    def take_back(self, whole: _Bytes) -> None:
        """Keep memory for the next array of that size."""
        idle = self._idle.setdefault(whole.nbytes, [])
        if len(idle) < self._max_idle:
            idle.append(whole)


def _aligned(nbytes: int) -> _Bytes:
    memory = np.empty(nbytes + _ALIGNED, np.uint8)
    start = -memory.ctypes.data % _ALIGNED
    return memory[start : start + nbytes]


class _Lent:
    """Stands under every array over some memory, so that it goes when the last of them does."""

    __slots__ = ("__array_interface__", "_slabs", "_whole")

    def __init__(self, whole: _Bytes, slabs: Slabs) -> None:
        self.__array_interface__ = whole.__array_interface__
        self._whole = whole
        self._slabs = weakref.ref(slabs)

    def __del__(self) -> None:
        slabs = self._slabs()
        if slabs is not None:
            slabs.take_back(self._whole)


Columns = tuple[npt.NDArray[np.generic], ...]
_Places = slice | npt.NDArray[np.int64]
_Layout = list[tuple[tuple[int, ...], np.dtype[np.generic]]]

# From here on copying a row takes longer than naming it, so that rows are copied one by one rather than all twice.
_LARGE_ROW = 16 << 10


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Gathered:
    """Rows that lie scattered in a table; nothing is copied before their batch is filled.

    Attributes:
        table: ``[m, ...]``, contiguous; the rows that are named must stay as they are until their batch is there.
        rows: ``int64[n]``, which of them, in this order.
    """

    table: npt.NDArray[np.generic]
    rows: npt.NDArray[np.int64]

    @property
    def shape(self) -> tuple[int, ...]:
        """As of an array of these rows."""
        return (len(self.rows), *self.table.shape[1:])

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """Of the table."""
        return self.table.dtype


Column = npt.NDArray[np.generic] | Gathered


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowRange:
    """Some rows of a run of rows, from one source: the node's answer, or the cache.

    Attributes:
        places: ``int64[n]``, where the rows stand in the run, ascending; None where the part is the whole run.
        columns: arrays ``[n, ...]``, such as ids, labels and activations, or rows of tables; only read.
        is_kept: they come from a cache.
    """

    places: npt.NDArray[np.int64] | None = None
    columns: tuple[Column, ...]
    is_kept: bool = False

    def __len__(self) -> int:
        return self.columns[0].shape[0]


class BatchAssembler:
    """Fills batches in order. Skipped samples are never added, so they leave no hole. Not safe for several threads.

    Args:
        batch_size: rows of every batch but perhaps the last.
        drop_last: leave out a last batch with fewer rows.
        memory: where batches lie; None for memory of this process that is used again.

    Attributes:
        kept: rows from a cache in the batch that was given away last.
    """

    def __init__(self, *, batch_size: int, drop_last: bool, memory: Memory | None = None) -> None:
        self.kept = 0
        self._batch_size = batch_size
        self._drop_last = drop_last
        self._memory = Slabs() if memory is None else memory
        self._layout: _Layout = []
        self._slabs: Columns = ()
        self._filled = 0
        self._filled_kept = 0

    def add(self, *columns: Column) -> Iterator[Columns]:
        """Add rows from one source; see ``merge``."""
        return self.merge(RowRange(columns=columns))

    def merge(self, *parts: RowRange) -> Iterator[Columns]:
        """Add a run of rows that come from several sources, and yield each batch that they complete.

        Args:
            *parts: together they name each place from 0 to the number of rows once.

        Yields:
            Arrays ``[batch_size, ...]`` in the columns' order; the caller's own, never written again.

        Raises:
            ValueError: a row's shape or type differs from the rows before it.
        """
        parts = tuple(part for part in parts if len(part))
        for part in parts:
            self._fit(part.columns)
        rows = sum(map(len, parts))
        done = 0
        while done < rows:
            step = min(rows - done, self._batch_size - self._filled)
            self._copy(parts, done, step)
            done += step
            if self._filled == self._batch_size:
                yield self._give_away()

    def pending(self, column: int) -> npt.NDArray[np.generic] | None:
        """One column of the rows that wait for their batch to be full, in its own memory; None where none do."""
        return self._slabs[column][: self._filled] if self._filled else None

    def finish(self, minimum: int = 0) -> Columns | None:
        """The last batch, with the rows that are left; None where none are, or ``drop_last`` leaves it out.

        Args:
            minimum: rows that it has if it has any, at most a whole batch's: its own come again, in turn.
        """
        filled = self._filled
        slabs = self._give_away()
        if not filled or self._drop_last:
            return None
        again = np.arange(minimum - filled) % filled
        for slab in slabs:
            slab[filled : filled + len(again)] = slab[again]
        return tuple(slab[: filled + len(again)] for slab in slabs)

    def _fit(self, columns: Sequence[Column]) -> None:
        """Learn the rows' layout from the first ones, and hold later ones to it."""
        given = [(column.shape[1:], column.dtype) for column in columns]
        self._layout = self._layout or given
        if given != self._layout:
            raise ValueError(f"a batch of rows like {self._layout} cannot take rows like {given}")

    def _copy(self, parts: Sequence[RowRange], start: int, rows: int) -> None:
        """Copy the run's rows from ``start`` on to where the batch is filled up to."""
        if not self._slabs:
            self._slabs = tuple(self._memory.empty((self._batch_size, *shape), dtype) for shape, dtype in self._layout)
        for part in parts:
            some, target = _within(part.places, start, rows, self._filled)
            for slab, column in zip(self._slabs, part.columns, strict=True):
                _copy(column, some, slab, target)
            self._filled_kept += (some.stop - some.start) * part.is_kept
        self._filled += rows

    def _give_away(self) -> Columns:
        slabs, self._slabs, self._filled = self._slabs, (), 0
        self.kept, self._filled_kept = self._filled_kept, 0
        return slabs


def _within(places: npt.NDArray[np.int64] | None, start: int, rows: int, filled: int) -> tuple[slice, _Places]:
    """Which of a part's rows lie within a stretch of the run, and where they go in the batch."""
    if places is None:
        return slice(start, start + rows), slice(filled, filled + rows)
    first, stop = np.searchsorted(places, (start, start + rows)).tolist()
    target = places[first:stop] - start + filled
    if len(target) and target[-1] - target[0] + 1 == len(target):  # neighbours, which are copied in one piece
        return slice(first, stop), slice(int(target[0]), int(target[-1]) + 1)
    return slice(first, stop), target


def _copy(column: Column, some: slice, slab: npt.NDArray[np.generic], target: _Places) -> None:
    if not isinstance(column, Gathered):
        slab[target] = column[some]
        return
    table, rows = column.table, column.rows[some]
    if isinstance(target, slice):
        # Any other mode than raise writes to ``out`` itself, and not to a copy first.
        table.take(rows, 0, slab[target], "clip")
    elif slab[:1].nbytes < _LARGE_ROW:
        slab[target] = table[rows]
    else:
        for place, row in zip(target.tolist(), rows.tolist(), strict=True):
            slab[place] = table[row]
