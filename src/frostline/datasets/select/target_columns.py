"""The declared targets of some rows of a manifest, read from its columns when a batch of them is put together."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from frostline.datasets.formats.columns import ManifestColumns, SelectedRows
from frostline.datasets.select.selection import values_of
from frostline.datasets.select.target_specs import (
    MASK,
    MULTI_LABEL,
    NUMBER,
    TEXT,
    TEXTS,
    VECTOR,
    TargetSpec,
    listed,
)
from frostline.errors import DataError

__all__ = ("TargetColumns", "TargetValue", "TargetValues")

TargetValue = npt.NDArray[np.generic] | list[Any]
"""A column of a batch: one array; or a list with an array, a text or a list of texts for each sample."""
TargetValues = TargetValue | dict[str, TargetValue]
"""The targets of a batch: those of a column, or of several by their names."""

_Rows = npt.NDArray[np.int64]


class TargetColumns:
    """The declared targets of a data set, by the rows of its samples. Immutable, safe for threads.

    Args:
        columns: table of the whole manifest.
        rows: rows of the data set; None where it has all of them.
        specs: kinds of the declared columns.
        is_single: one column was declared by its name alone, so that a batch has its values and no dict.

    Attributes:
        specs: as given.
        is_single: as given.

    Raises:
        DataError: samples have no value in a column that cannot say so.
    """

    def __init__(
        self, columns: ManifestColumns, rows: SelectedRows | None, specs: Sequence[TargetSpec], *, is_single: bool
    ) -> None:
        self._columns = columns
        self._rows = rows
        self.specs = tuple(specs)
        self.is_single = is_single
        for spec in specs:
            self._check_values(spec)

    @property
    def has_masks(self) -> bool:
        """The samples' masks are among them."""
        return any(spec.kind == MASK for spec in self.specs)

    def at(self, rows: _Rows, masks: TargetValue | None = None) -> TargetValues:
        """The targets of some samples.

        Args:
            rows: rows of the data set's own samples, ``int64[n]``.
            masks: their masks, which are in no column; None where none are declared.

        Raises:
            DataError: a value does not have the shape that its column has.
        """
        places = pa.array(rows if self._rows is None else self._rows.at(rows))
        found: dict[str, TargetValue] = {}
        for spec in self.specs:
            if spec.kind != MASK:
                found[spec.name] = _values(spec, self._taken(spec, places))
            elif masks is not None:
                found[spec.name] = masks
        return found[self.specs[0].name] if self.is_single else found

    def _taken(self, spec: TargetSpec, places: pa.Array) -> pa.Array:
        column = self._columns.table.column(spec.column)
        found = column.take(places).combine_chunks()
        self._columns.forget()
        return found

    def _check_values(self, spec: TargetSpec) -> None:
        column = self._columns.table.column(spec.column)
        is_label = spec.column == "label"
        if (spec.kind == NUMBER and spec.dtype == "float32") or not (column.null_count or is_label):
            return
        values = values_of(self._columns, self._rows, spec.column)
        without = pc.sum(pc.less(values, 0)).as_py() or 0 if is_label else values.null_count
        if without:
            how = (
                f", such as select({f'{spec.name} is not None'!r})" if spec.name.isidentifier() and not is_label else ""
            )
            raise DataError(
                f"{without} of {len(values)} samples have no value in the column {spec.name!r}, which is a target: "
                f"leave them out{how}"
            )


def _values(spec: TargetSpec, column: pa.Array) -> TargetValue:
    if spec.kind == NUMBER:
        return _numbers(spec, column)
    values: list[Any] = column.to_pylist()
    if spec.kind == TEXT:
        return values
    lists = [listed(spec, value) for value in values]
    if spec.kind == TEXTS:
        return lists
    if spec.kind == MULTI_LABEL:
        return _many_hot(spec, lists)
    if spec.kind == VECTOR:
        return _array(spec, lists, (len(lists), *spec.shape))
    return [_array(spec, value, (len(value), *spec.shape[1:])) for value in lists]


def _numbers(spec: TargetSpec, column: pa.Array) -> TargetValue:
    plain = column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
    wide = plain.cast(pa.float64() if spec.dtype == "float32" else pa.int64())
    return np.array(wide.to_numpy(zero_copy_only=False), spec.dtype)


def _array(spec: TargetSpec, values: list[Any], shape: tuple[int | None, ...]) -> npt.NDArray[np.generic]:
    if not values:
        return np.zeros([length or 0 for length in shape], spec.dtype)
    try:
        found = np.array(values, spec.dtype)
    except (OverflowError, TypeError, ValueError):
        found = np.zeros(0)
    if found.shape != shape:
        raise DataError(
            f"the column {spec.name!r} holds {spec.dtype} values of the shape {list(spec.shape)}, and "
            f"{str(values)[:60]} has another one"
        )
    return found


def _many_hot(spec: TargetSpec, lists: Sequence[list[Any]]) -> npt.NDArray[np.float32]:
    found = np.zeros((len(lists), *[length or 0 for length in spec.shape]), np.float32)
    places = {name: place for place, name in enumerate(spec.classes)}
    for row, labels in enumerate(lists):
        for label in labels:
            found[row, _place(spec, places, label)] = 1
    return found


def _place(spec: TargetSpec, places: dict[str, int], label: object) -> int:
    if isinstance(label, str) and label in places:
        return places[label]
    if isinstance(label, int) and 0 <= label < (spec.shape[0] or 0):
        return label
    raise DataError(f"the column {spec.name!r} holds {label!r}, which is none of its {spec.shape[0]} classes")
