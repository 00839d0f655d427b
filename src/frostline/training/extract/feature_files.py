"""Writes the features of a data set as one file, Parquet or safetensors, from tables that come one at a time."""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from frostline.errors import SettingError
from frostline.training.files import atomic_file

__all__ = ("SUFFIXES", "Contents", "check_suffix", "tensor_column", "write_features")

# What the format calls them, and the bytes of one number.
_DTYPES = {
    "bool": ("BOOL", 1),
    "float16": ("F16", 2),
    "float32": ("F32", 4),
    "float64": ("F64", 8),
    "int32": ("I32", 4),
    "int64": ("I64", 8),
    "uint8": ("U8", 1),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What all tables together hold.

    Attributes:
        rows: rows of all tables.
        shape: shape of one sample's features.
        dtype: dtype of the features.
        classes: names, by label.
    """

    rows: int
    shape: tuple[int, ...]
    dtype: str
    classes: tuple[str, ...]


def check_suffix(out: Path) -> None:
    """Make sure that a file's name says what it shall be.

    Raises:
        SettingError: the file's name ends in neither of the known suffixes.
    """
    if out.suffix not in SUFFIXES:
        raise SettingError(f"{out.name} must end in {' or '.join(SUFFIXES)}, which says what to write")


def write_features(out: Path, tables: Iterable[pa.Table], contents: Contents) -> None:
    """Write the file in one step, in the format that its suffix names.

    Args:
        out: the file.
        tables: in order; each has ``id``, ``label`` and ``features``, and one is in memory at a time.
        contents: contents of all of them together.

    Raises:
        OutOfSpace: the disk is full.
        SettingError: the folder cannot be written.
    """
    with atomic_file(out) as file:
        SUFFIXES[out.suffix](file, tables, contents)


def tensor_column(features: npt.NDArray[Any]) -> pa.Array:
    """Features ``[n, ...]`` as a column of tensors; ``n`` may be 0."""
    shape = features.shape[1:]
    values = pa.array(np.ascontiguousarray(features).reshape(-1))
    storage = pa.FixedSizeListArray.from_arrays(values, math.prod(shape))
    return pa.ExtensionArray.from_storage(pa.fixed_shape_tensor(values.type, shape), storage)


def _write_parquet(file: BinaryIO, tables: Iterable[pa.Table], contents: Contents) -> None:  # noqa: ARG001
    writer = None
    for table in tables:
        writer = writer or pq.ParquetWriter(file, table.schema)
        writer.write_table(table)
    assert writer is not None
    writer.close()


def _write_safetensors(file: BinaryIO, tables: Iterable[pa.Table], contents: Contents) -> None:
    """A header's length, the header as JSON, the tensors' bytes: see huggingface.co/docs/safetensors.

    Written here and not by the package, because the tensors need not fit into memory.
    """
    text = _header(contents)
    file.write(len(text).to_bytes(8, "little") + text)
    ids, labels = [], []
    for table in tables:
        if table.num_rows:
            features = table["features"].combine_chunks().to_numpy_ndarray()
            file.write(np.ascontiguousarray(features).data)
        ids.append(table["id"].to_numpy())
        labels.append(table["label"].to_numpy())
    for numbers in (ids, labels):
        file.write(np.concatenate(numbers).astype("<i8").tobytes())


def _header(contents: Contents) -> bytes:
    shapes = {
        "features": (contents.dtype, (contents.rows, *contents.shape)),
        "ids": ("int64", (contents.rows,)),
        "labels": ("int64", (contents.rows,)),
    }
    header: dict[str, Any] = {"__metadata__": {"classes": json.dumps(contents.classes)}}
    start = 0
    for name, (dtype, shape) in shapes.items():
        named, itemsize = _DTYPES[dtype]
        stop = start + math.prod(shape) * itemsize
        header[name] = {"dtype": named, "shape": shape, "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header).encode()
    return text + b" " * (-len(text) % 8)


SUFFIXES = {".parquet": _write_parquet, ".safetensors": _write_safetensors}
"""Writers, by the suffix that asks for them."""
