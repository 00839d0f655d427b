"""Decides which rows of a whole table a part of a part has; ``None`` stands for all rows."""

import numpy as np
import numpy.typing as npt

from frostline.datasets.columns import Rows
from frostline.ordering import Chosen, Places

__all__ = ("as_chosen", "kept_of", "numbered", "rows_of_ids", "within")


def as_chosen(rows: Rows | None, size: int) -> Chosen:
    """The same rows in the table's order."""
    if rows is None:
        return Chosen.where(np.ones(size, np.bool_))
    return rows if isinstance(rows, Chosen) else Chosen.of(rows.pieces(), size)


def kept_of(rows: Rows | None, mask: npt.NDArray[np.bool_]) -> Rows:
    """Those of the rows at which a mask of the whole table is true, in the order that they had."""
    if rows is None:
        return Chosen.where(mask)
    kept = (some[mask[some]] for some in rows.pieces())
    if isinstance(rows, Chosen):
        return Chosen.of(kept, rows.size)
    return Places(np.concatenate([np.zeros(0, np.int64), *kept]))


def numbered(rows: Rows | None, parts: npt.NDArray[np.uint8], number: int) -> Rows:
    """Those of the rows whose part, by their position, has that number."""
    chosen = Chosen.equal(parts, number)
    if rows is None:
        return chosen
    if isinstance(rows, Chosen):
        return Chosen.of((rows.at(some) for some in chosen.pieces()), rows.size)
    return Places(rows.at(np.flatnonzero(parts == number)))


def rows_of_ids(ids: npt.NDArray[np.int64], wanted: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Where ids stand in a table, in the order in which they are wanted, without those that stand nowhere."""
    order = np.argsort(ids, kind="stable")
    places = np.searchsorted(ids, wanted, sorter=order)
    is_there = places < len(ids)
    rows = order[places[is_there]]
    return np.asarray(rows[ids[rows] == wanted[is_there]], np.int64)


def within(rows: Rows | None, chosen: Chosen) -> Rows:
    """Those of the rows that a choice has too, in the order that they had."""
    if rows is None:
        return chosen
    mask = np.zeros(chosen.size, np.bool_)
    for some in chosen.pieces():
        mask[some] = True
    return kept_of(rows, mask)
