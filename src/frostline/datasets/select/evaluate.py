"""Evaluates a selection on a manifest's columns, some hundred thousand rows at a time, in the thread that asks."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from frostline.datasets.formats.columns import ManifestColumns, SelectedRows
from frostline.datasets.manifest.row_subset import kept_of
from frostline.datasets.select.filter_parser import parse_expression
from frostline.errors import DataError, SettingError

__all__ = ("groups_of", "select_rows", "values_of")


def select_rows(
    columns: ManifestColumns, rows: SelectedRows | None, chosen: str | pc.Expression, classes: Sequence[str]
) -> SelectedRows:
    """The rows, of those given or of all, for which a selection holds; where it is unknown, it does not.

    Raises:
        SettingError: the selection makes no sense for these columns.
    """
    expression = parse_expression(chosen, columns.table.schema, classes) if isinstance(chosen, str) else chosen
    mask = np.empty(len(columns), np.bool_)
    done = 0
    for piece in columns.scan(columns.table.column_names):
        found = _evaluated(piece, expression)
        mask[done : done + len(found)] = found
        done += len(found)
    return kept_of(rows, mask)


def values_of(columns: ManifestColumns, rows: SelectedRows | None, name: str) -> pa.ChunkedArray:
    """A column's values at the given rows, or at all.

    Raises:
        SettingError: there is no such column.
    """
    known = columns.table.column_names
    if name not in known:
        raise SettingError(f"there is no column {name!r}, only {', '.join(known)}")
    column = columns.table.column(name)
    if rows is None:
        return column
    whole = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    return pa.chunked_array([whole.take(pa.array(some)) for some in rows.pieces()], column.type)


def groups_of(
    columns: ManifestColumns, rows: SelectedRows | None, name: str
) -> tuple[npt.NDArray[np.int64], list[object]]:
    """Numbers of the groups that equal values of a column make, in the order of the values; and the values.

    Raises:
        SettingError: there is no such column.
        DataError: a sample has no value there.
    """
    values = values_of(columns, rows, name)
    if values.null_count:
        raise DataError(
            f"{values.null_count} samples have no {name!r}: leave them out first, select('{name} is not None')"
        )
    encoded = values if pa.types.is_dictionary(values.type) else values.dictionary_encode()
    encoded = encoded.unify_dictionaries().combine_chunks()
    if isinstance(encoded, pa.ChunkedArray):  # of no chunks at all
        return np.zeros(0, np.int64), []
    order = pc.sort_indices(encoded.dictionary).to_numpy()
    number = np.empty(len(order), np.int64)
    number[order] = np.arange(len(order))
    return number[encoded.indices.to_numpy()], encoded.dictionary.take(pa.array(order)).to_pylist()


def _evaluated(piece: pa.Table, expression: pc.Expression) -> npt.NDArray[np.bool_]:
    from pyarrow import acero

    steps = [
        acero.Declaration("table_source", acero.TableSourceNodeOptions(piece)),
        acero.Declaration("project", acero.ProjectNodeOptions([expression], ["kept"])),
    ]
    try:
        # One thread: Arrow's pool would not survive a fork of the process, and rows keep their order.
        found = acero.Declaration.from_sequence(steps).to_table(use_threads=False).column("kept")
        if not pa.types.is_boolean(found.type):
            raise SettingError(f"a selection says of each sample whether it is wanted; this one gives {found.type}")
    except (pa.ArrowException, TypeError) as error:
        raise SettingError(f"the selection does not fit the columns: {str(error).splitlines()[0]}") from error
    return np.asarray(pc.fill_null(found, False).to_numpy(), np.bool_)
