"""Lists that samples say of themselves, such as boxes and tags, as a table keeps them: JSON in a column of texts."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

__all__ = ("flattened", "in_json", "is_list", "list_column", "list_columns", "list_names", "short_lists")

# Longer lists are data and not what is said of it: a table of samples would be as large as they are.
_MAX_VALUES = 256
# Of the text that a number takes.
_BYTES_A_VALUE = 16


def is_list(kind: pa.DataType) -> bool:
    """Whether values of that type are lists of numbers, truth values or texts, or lists of lists of numbers."""
    inner = _inner(kind)
    if inner is None:
        return False
    deepest = _inner(inner)
    return _is_number(inner) or _is_text(inner) if deepest is None else _is_number(deepest)


def list_names(schema: pa.Schema) -> tuple[str, ...]:
    """The paths of the columns that hold lists; those of a struct, such as ``objects.bbox``, are columns too."""
    return tuple(path for path, kind in _fields(schema) if is_list(kind))


def list_columns(parquet: pq.ParquetFile, names: Sequence[str]) -> dict[str, pa.Array]:
    """Columns of lists as texts, by their paths, without those whose lists have more than 256 values on average."""
    short = [name for name in names if _mean_values(parquet, name) <= _MAX_VALUES]
    if not short:
        return {}
    # One thread: Arrow's pool would not survive a fork of the process.
    table = parquet.read(columns=short, use_threads=False)
    return {name: in_json(_at(table, name)) for name in short}


def short_lists(table: pa.Table, paths: Sequence[str]) -> dict[str, pa.Array]:
    """Columns of lists of a table as texts, by their paths, without those with long lists; see ``list_columns``."""
    found = {path: _at(table, path) for path in paths if path.partition(".")[0] in table.column_names}
    return {path: in_json(column) for path, column in found.items() if _leaves(column) <= _MAX_VALUES * len(table)}


def _leaves(column: pa.ChunkedArray) -> int:
    """Values in all lists of a column together."""
    while _inner(column.type) is not None:
        column = pc.list_flatten(column)
    return len(column)


def list_column(values: Sequence[Any]) -> pa.Array | None:
    """Values of one field as texts; None where one is no plain list, or the lists are too long to be kept.

    Args:
        values: one a sample; None where it has none.
    """
    there = [value for value in values if value is not None]
    if not there or not all(map(_is_plain, there)):
        return None
    column = in_json(values)
    nbytes = sum(len(text) for text in column.to_pylist() if text)
    return None if nbytes > _MAX_VALUES * _BYTES_A_VALUE * len(values) else column


def in_json(values: pa.ChunkedArray | Sequence[Any]) -> pa.Array:
    """Values as JSON, null where there is none: numbers with a fraction keep their point, texts stay as they are."""
    plain = values.to_pylist() if isinstance(values, pa.ChunkedArray) else values
    return pa.array([_text(value) for value in plain], pa.string())


def _text(value: Any) -> str | None:
    if value is None or value != value:
        return None
    if isinstance(value, str):
        return value
    # JSON can escape halves of characters, which cannot be written down.
    return json.dumps(value, ensure_ascii=True)


def _inner(kind: pa.DataType) -> pa.DataType | None:
    is_one = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    return kind.value_type if is_one else None


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _fields(schema: pa.Schema) -> Iterator[tuple[str, pa.DataType]]:
    for field in schema:
        if pa.types.is_struct(field.type):
            yield from ((f"{field.name}.{inner.name}", inner.type) for inner in field.type)
        else:
            yield field.name, field.type


def _mean_values(parquet: pq.ParquetFile, name: str) -> float:
    """Values of a sample's list, by what the file says of itself."""
    about = parquet.metadata
    values = 0
    for group in range(about.num_row_groups):
        chunks = map(about.row_group(group).column, range(about.num_columns))
        values += sum(chunk.num_values for chunk in chunks if chunk.path_in_schema.startswith(f"{name}."))
    return float(values / max(1, about.num_rows))


def _at(table: pa.Table, path: str) -> pa.ChunkedArray:
    if path in table.column_names:
        return table[path]
    outer, _, inner = path.partition(".")
    return pc.struct_field(table[outer], inner)


def _is_plain(value: Any) -> bool:
    if not isinstance(value, list):
        return False
    if value and all(isinstance(inner, list) for inner in value):
        return all(_are_numbers(inner) for inner in value)
    return _are_numbers(value) or all(isinstance(inner, str) for inner in value)


def _are_numbers(values: Sequence[Any]) -> bool:
    return all(isinstance(value, int | float) for value in values)


def flattened(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of JSON whose lists within an object are fields of their own, such as ``objects.bbox``."""
    found = dict(row)
    for name, value in row.items():
        if isinstance(value, dict):
            found |= {f"{name}.{inner}": listed for inner, listed in value.items() if isinstance(listed, list)}
    return found
