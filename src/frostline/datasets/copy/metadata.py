"""Decides what of a data set's metadata goes along where something is made of it, and says what stays behind."""

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from frostline.datasets.dataset import Dataset
from frostline.datasets.formats.base import COLUMNS, TARGET_COLUMNS
from frostline.datasets.formats.tables import plain
from frostline.events import ColumnsDropped, Observer

__all__ = ("Metadata", "metadata_in", "say_what_is_left")

_KINDS = {pa.int64(): "bigint", pa.float64(): "double", pa.bool_(): "boolean", pa.string(): "text"}
_TIME = pa.timestamp("ms")


def metadata_in(columns: Sequence[str]) -> tuple[str, ...]:
    """Those of a data set's columns that are not of its samples' own."""
    return tuple(name for name in columns if name not in COLUMNS.names and name not in TARGET_COLUMNS.names)


def say_what_is_left(source: Dataset, observe: Observer, left: Sequence[str] | None = None) -> None:
    """Tell which metadata columns of a data set stay behind, before something without them is made of it.

    Args:
        source: data set that has the metadata.
        observe: told, if there are any.
        left: their names; None for all that there are.
    """
    columns = metadata_in(source.columns) if left is None else tuple(left)
    if columns:
        observe(ColumnsDropped(url=source.url, columns=columns))


class Metadata:
    """The metadata columns of a data set that hold one plain value a sample, in one of five types.

    Attributes:
        nested: names of the columns that are left out because their values are lists or the like.
    """

    def __init__(self, source: Dataset) -> None:
        names = metadata_in(source.columns)
        columns = {name: source.column(name) for name in names}
        self.nested = tuple(name for name in names if pa.types.is_nested(columns[name].type))
        self._columns = {name: _plain(columns[name]) for name in names if name not in self.nested}

    @property
    def kinds(self) -> Mapping[str, str]:
        """Type of each column, in the words of CQL, by its name."""
        return {
            name: "timestamp" if column.type == _TIME else _KINDS[column.type] for name, column in self._columns.items()
        }

    def without(self, names: Sequence[str]) -> "Metadata":
        """The metadata without some columns."""
        rest = object.__new__(Metadata)
        rest.nested = self.nested
        rest._columns = {name: column for name, column in self._columns.items() if name not in names}
        return rest

    def rows(self, start: int, stop: int) -> list[tuple[Any, ...]]:
        """The values of some samples, each in the order of the columns."""
        values = [column.slice(start, stop - start).to_pylist() for column in self._columns.values()]
        return list(zip(*values, strict=True)) if values else [()] * (stop - start)

    def table(self, start: int, stop: int) -> Mapping[str, pa.ChunkedArray]:
        """The columns of some samples, by name."""
        return {name: column.slice(start, stop - start) for name, column in self._columns.items()}


def _plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    if pa.types.is_timestamp(column.type):
        return column.cast(pa.timestamp("ms", column.type.tz), safe=False).cast(_TIME)
    if pa.types.is_null(column.type) or pa.types.is_large_string(column.type):
        return column.cast(pa.string())
    return plain(column)
