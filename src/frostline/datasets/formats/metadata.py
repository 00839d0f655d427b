"""Decides the metadata columns of a table from what its samples say of themselves, field by field."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from frostline.datasets.formats.base import COLUMNS, TARGET_COLUMNS

__all__ = ("SOURCE", "columns_of", "joined")

SOURCE = "frostline_source"
"""The column that says what a sample was called before it was first copied; what users call ``source`` is their own."""

# Data whose fields are names of things would else have as many columns as samples.
_MAX_COLUMNS = 256
# What a table without masks calls its columns must not make it one with masks.
_TAKEN = frozenset([*COLUMNS.names, *TARGET_COLUMNS.names])
_INT64 = range(-(1 << 63), 1 << 63)


def columns_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, pa.Array]:
    """One column a field that is scalar wherever it stands, null where it does not; the 256 commonest of them.

    Whole numbers, other numbers, truth values and texts become columns of their type; a field with several kinds of
    values becomes texts. A field named as one of a sample's own columns gets ``meta_`` before its name.
    """
    count = Counter(name for row in rows for name in row)
    nested = {name for row in rows for name, value in row.items() if isinstance(value, dict | list)}
    names = [name for name, _ in count.most_common() if name not in nested][:_MAX_COLUMNS]
    return {column_name(name): _column([row.get(name) for row in rows]) for name in sorted(names)}


def column_name(field: str) -> str:
    """The name of a field's column."""
    return f"meta_{_text(field)}" if field in _TAKEN else _text(field)


def joined(tables: Sequence[pa.Table]) -> pa.Table:
    """Tables below each other; a column missing in one is null there, and one of several types becomes texts."""
    types: dict[str, set[pa.DataType]] = {}
    for table in tables:
        for field in table.schema:
            if not pa.types.is_null(field.type):
                types.setdefault(field.name, set()).add(field.type)
    mixed = {name for name, kinds in types.items() if len(kinds) > 1 and not kinds <= {pa.int64(), pa.float64()}}
    return pa.concat_tables([_with_texts(table, mixed) for table in tables], promote_options="permissive")


def _with_texts(table: pa.Table, names: set[str]) -> pa.Table:
    for place, name in enumerate(table.schema.names):
        if name in names:
            table = table.set_column(place, name, table[name].cast(pa.string()))
    return table


def _column(values: list[Any]) -> pa.Array:
    kinds = {type(value) for value in values if value is not None}
    if kinds <= {int} and all(value is None or value in _INT64 for value in values):
        return pa.array(values, pa.int64() if kinds else pa.null())
    if kinds <= {int, float}:
        return pa.array([None if value is None else float(value) for value in values], pa.float64())
    if kinds == {bool}:
        return pa.array(values, pa.bool_())
    return pa.array([None if value is None else _said(value) for value in values], pa.string())


def _said(value: Any) -> str:
    return _text(value) if isinstance(value, str) else json.dumps(value)


def _text(value: str) -> str:
    # JSON can escape halves of characters, which cannot be written down.
    return value.encode("utf-8", "replace").decode()
