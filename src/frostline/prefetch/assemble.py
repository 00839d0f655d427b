"""Turns in-order rows into batches of an exact size: each row is copied once, on arrival, into its batch's slab."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ("BatchAssembler", "Columns", "Part")

Columns = tuple[npt.NDArray[np.generic], ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Part:
    """Some rows of a run of rows, from one source: the node's answer, or the cache.

    Attributes:
        places: ``int64[n]``, where the rows stand in the run, ascending.
        columns: arrays ``[n, ...]``, such as ids, labels and activations; only read.
    """

    places: npt.NDArray[np.int64]
    columns: Columns


class BatchAssembler:
    """Fills batches in order. Skipped samples are never added, so they leave no hole. Not safe for several threads.

    Args:
        batch_size: rows of every batch but perhaps the last.
        drop_last: leave out a last batch with fewer rows.
    """

    def __init__(self, *, batch_size: int, drop_last: bool) -> None:
        self._batch_size = batch_size
        self._drop_last = drop_last
        self._slabs: Columns = ()
        self._filled = 0

    def add(self, *columns: npt.NDArray[np.generic]) -> Iterator[Columns]:
        """Add rows from one source; see ``merge``."""
        return self.merge(Part(places=np.arange(len(columns[0])), columns=columns))

    def merge(self, *parts: Part) -> Iterator[Columns]:
        """Add a run of rows that come from several sources, and yield each batch that they complete.

        Args:
            *parts: together they name each place from 0 to the number of rows once.

        Yields:
            Arrays ``[batch_size, ...]`` in the columns' order; the caller's own, never written again.

        Raises:
            ValueError: a row's shape or type differs from the rows before it.
        """
        parts = tuple(part for part in parts if len(part.places))
        rows = sum(len(part.places) for part in parts)
        done = 0
        while done < rows:
            step = min(rows - done, self._batch_size - self._filled)
            self._copy(parts, done, step)
            done += step
            if self._filled == self._batch_size:
                yield self._give_away()

    def finish(self) -> Columns | None:
        """The last batch, with the rows that are left; None where none are, or ``drop_last`` leaves it out."""
        rows = self._filled
        last = tuple(slab[:rows] for slab in self._give_away())
        return last if rows and not self._drop_last else None

    def _copy(self, parts: Sequence[Part], start: int, rows: int) -> None:
        """Copy the run's rows from ``start`` on to where the batch is filled up to."""
        for part in parts:
            self._fit(part.columns)
            first, stop = np.searchsorted(part.places, (start, start + rows))
            target = part.places[first:stop] - start + self._filled
            for slab, column in zip(self._slabs, part.columns, strict=True):
                slab[_as_slice(target)] = column[first:stop]
        self._filled += rows

    def _fit(self, columns: Columns) -> None:
        """Make the slabs after the first rows, and hold later rows to them."""
        if not self._slabs:
            self._slabs = tuple(np.empty((self._batch_size, *one.shape[1:]), one.dtype) for one in columns)
        wanted = [(slab.shape[1:], slab.dtype) for slab in self._slabs]
        given = [(one.shape[1:], one.dtype) for one in columns]
        if given != wanted:
            raise ValueError(f"a batch of rows like {wanted} cannot take rows like {given}")

    def _give_away(self) -> Columns:
        slabs, self._slabs, self._filled = self._slabs, (), 0
        return slabs


def _as_slice(places: npt.NDArray[np.int64]) -> slice | npt.NDArray[np.int64]:
    """Neighbouring places as a slice, which copies whole blocks."""
    if len(places) and places[-1] - places[0] + 1 == len(places):
        return slice(int(places[0]), int(places[-1]) + 1)
    return places
