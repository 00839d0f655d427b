"""Decides which rows of a whole table a part of a part has; ``None`` stands for all rows."""

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from frostline.datasets.formats.columns import SelectedRows
from frostline.ordering import Chosen, RowIndices

__all__ = ("JoinedRows", "as_chosen", "kept_of", "numbered", "rows_of_ids", "within")


def as_chosen(rows: SelectedRows | None, size: int) -> Chosen:
    """The same rows in the table's order."""
    if rows is None:
        return Chosen.where(np.ones(size, np.bool_))
    return rows if isinstance(rows, Chosen) else Chosen.of(rows.pieces(), size)


def kept_of(rows: SelectedRows | None, mask: npt.NDArray[np.bool_]) -> SelectedRows:
    """Those of the rows at which a mask of the whole table is true, in the order that they had."""
    if rows is None:
        return Chosen.where(mask)
    kept = (some[mask[some]] for some in rows.pieces())
    if isinstance(rows, Chosen):
        return Chosen.of(kept, rows.size)
    return RowIndices(np.concatenate([np.zeros(0, np.int64), *kept]))


def numbered(rows: SelectedRows | None, parts: npt.NDArray[np.uint8], number: int) -> SelectedRows:
    """Those of the rows whose part, by their position, has that number."""
    chosen = Chosen.equal(parts, number)
    if rows is None:
        return chosen
    if isinstance(rows, Chosen):
        return Chosen.of((rows.at(some) for some in chosen.pieces()), rows.size)
    return RowIndices(rows.at(np.flatnonzero(parts == number)))


def rows_of_ids(ids: npt.NDArray[np.int64], wanted: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Where ids stand in a table, in the order in which they are wanted, without those that stand nowhere."""
    order = np.argsort(ids, kind="stable")
    places = np.searchsorted(ids, wanted, sorter=order)
    is_there = places < len(ids)
    rows = order[places[is_there]]
    return np.asarray(rows[ids[rows] == wanted[is_there]], np.int64)


def within(rows: SelectedRows | None, chosen: Chosen) -> SelectedRows:
    """Those of the rows that a choice has too, in the order that they had."""
    if rows is None:
        return chosen
    mask = np.zeros(chosen.size, np.bool_)
    for some in chosen.pieces():
        mask[some] = True
    return kept_of(rows, mask)


class JoinedRows:
    """The rows of several parts of a table, one part after the other; a row may come more than once. Immutable.

    Args:
        parts: at least one.
    """

    def __init__(self, parts: Sequence[SelectedRows]) -> None:
        self._parts = tuple(parts)
        self._ends = np.cumsum([len(part) for part in parts], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def fingerprint(self) -> bytes:
        """32 bytes that name exactly these rows in this order."""
        each = (hashlib.sha256(part.fingerprint).digest() for part in self._parts)
        return hashlib.sha256(b"joined\0" + b"".join(each)).digest()

    def at(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The rows at these positions."""
        which = np.searchsorted(self._ends, positions, side="right")
        found = np.empty(len(positions), np.int64)
        for place, part in enumerate(self._parts):
            some = which == place
            found[some] = part.at(positions[some] - (self._ends[place] - len(part)))
        return found

    def pieces(self) -> Iterator[npt.NDArray[np.int64]]:
        """All rows in order, some of them at a time."""
        for part in self._parts:
            yield from part.pieces()
