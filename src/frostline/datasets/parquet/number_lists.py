"""Lists of numbers in a column of Parquet as arrays, each as NumPy's ``save`` would write it."""

from functools import lru_cache
from io import BytesIO
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.lib import format as npy

__all__ = ("HEADER_BYTES", "NUMBER_BYTES", "arrays_of", "number_lists")

HEADER_BYTES = 256
"""An upper bound of what stands before the numbers of an array."""

NUMBER_BYTES = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "FLOAT": 4, "DOUBLE": 8}
"""Bytes of a number once it is read, by the type that it has in the file."""


def number_lists(kind: pa.DataType) -> tuple[pa.DataType, tuple[int, ...]] | None:
    """The type of the numbers of a column of lists, and the shape of each value but for its first length.

    None where it is no column of lists of numbers; lists whose own items are lists of any length are none either. Lists
    of fixed lengths may lie in each other, and so may tensors of one shape.
    """
    kind = _storage(kind)
    if not _is_list(kind):
        return None
    inner, shape = kind.value_type, []
    while pa.types.is_fixed_size_list(inner):
        shape.append(inner.list_size)
        inner = inner.value_type
    is_number = pa.types.is_integer(inner) or (pa.types.is_floating(inner) and inner != pa.float16())
    return (inner, tuple(shape)) if is_number else None


def arrays_of(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """The arrays of a column of lists of numbers, encoded; null where there is no list."""
    return pa.chunked_array([_encoded(chunk) for chunk in column.chunks], pa.large_binary())


def _storage(kind: pa.DataType) -> pa.DataType:
    return kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _encoded(chunk: pa.Array) -> pa.Array:
    tensor = tuple(chunk.type.shape) if isinstance(chunk.type, pa.FixedShapeTensorType) else None
    lists = chunk.storage if isinstance(chunk, pa.ExtensionArray) else chunk
    there = lists.is_valid().to_pylist()
    ends = np.cumsum([0, *(length or 0 for length in lists.value_lengths().to_pylist())])
    numbers = lists.flatten()
    inner: tuple[int, ...] = ()
    while pa.types.is_fixed_size_list(numbers.type):
        inner = (*inner, numbers.type.list_size)
        numbers = numbers.flatten()
    values = numbers.to_numpy(zero_copy_only=False).reshape(-1, *inner)
    return pa.array(
        [
            _bytes(values[start:end], tensor) if is_there else None
            for start, end, is_there in zip(ends, ends[1:], there, strict=False)
        ],
        pa.large_binary(),
    )


def _bytes(values: np.ndarray[Any, Any], tensor: tuple[int, ...] | None) -> bytes:
    return _header(values.dtype.str, values.shape if tensor is None else tensor) + values.tobytes()


@lru_cache(1024)
def _header(dtype: str, shape: tuple[int, ...]) -> bytes:
    file = BytesIO()
    npy.write_array_header_1_0(file, {"descr": dtype, "fortran_order": False, "shape": shape})
    return file.getvalue()
