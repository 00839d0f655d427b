"""The further columns of a table as Arrow: which CQL type becomes which, page by page."""

from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa

from frostline.errors import DataError
from frostline.stores.cql.schema import TEXTS, WHOLE, Shape

__all__ = ("table_of",)

_TYPES = {
    **dict.fromkeys(TEXTS, pa.string()),
    **dict.fromkeys(WHOLE, pa.int64()),
    "boolean": pa.bool_(),
    "double": pa.float64(),
    "float": pa.float64(),
    "timestamp": pa.timestamp("ms"),
}


def table_of(shape: Shape, pages: Iterable[Sequence[Sequence[Any]]]) -> pa.Table:
    """The rows of a scan: a first column, ``/key``, with the keys, then those beside it.

    Raises:
        DataError: a whole number has more than 64 bits.
    """
    names = () if shape.rows is None else shape.rows.columns[1:]
    schema = pa.schema([("/key", pa.string()), *((name, _TYPES[shape.types[name]]) for name in names)])
    return pa.Table.from_batches([_batch(page, schema) for page in pages if page], schema)


def _batch(page: Sequence[Sequence[Any]], schema: pa.Schema) -> pa.RecordBatch:
    columns = zip(*page, strict=True)
    return pa.record_batch([_column(values, field) for values, field in zip(columns, schema, strict=True)], schema)


def _column(values: Sequence[Any], field: pa.Field) -> pa.Array:
    if field.type == pa.string():
        values = [None if value is None else str(value) for value in values]
    try:
        return pa.array(values, field.type)
    except (OverflowError, pa.ArrowInvalid) as error:
        raise DataError(f"the column {field.name} holds values that are no {field.type}") from error
