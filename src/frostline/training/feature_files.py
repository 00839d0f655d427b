"""Writes the features of a data set in one step, as Parquet, safetensors or Lance, and reads rows again."""

import json
import math
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from frostline.core.errors import OutOfSpace, SettingError
from frostline.core.files import make_private
from frostline.datasets.formats.base import label_numbers
from frostline.training.run_config import atomic_file

__all__ = (
    "LANCE",
    "Contents",
    "check_suffix",
    "lance_reader",
    "tensor_column",
    "write_features",
)


_SHAPE = b"shape"
_FULL = ("no space left", "disk quota exceeded")


def _check_lance() -> None:
    """Do nothing if the package is there. It is not imported yet, since it warns of every fork from then on.

    Raises:
        SettingError: The package is missing.
    """
    if find_spec("lance") is None:
        raise SettingError(
            "a name that ends in .lance needs the package pylance, which is not installed: pip install "
            "'frostline[lance]', or write .parquet or .safetensors"
        )


def _write_lance(out: Path, tables: Iterable[pa.Table], shape: tuple[int, ...]) -> None:
    """Write a Lance data set that takes its place in one step.

    Args:
        out: the folder.
        tables: the tables in order; one is in memory at a time.
        shape: shape of one sample's features, which become lists of as many numbers with this shape in their metadata.

    Raises:
        OutOfSpace: the disk is full.
        SettingError: the folder cannot be written.
    """
    lance = import_module("lance")
    part, before = (out.with_name(f".{out.name}.{secrets.token_hex(4)}.{end}") for end in ("part", "before"))
    rest = iter(tables)
    first = _flat(next(rest), shape)
    try:
        batches = _batches(first, rest, shape)
        lance.write_dataset(pa.RecordBatchReader.from_batches(first.schema, batches), str(part), schema=first.schema)
        make_private(part)  # libraries write for everybody
        _replace(part, out, before)
    except OSError as error:
        if any(words in str(error).lower() for words in _FULL):
            raise OutOfSpace(f"no space left to write {out}: free some, or choose another folder") from error
        raise SettingError(f"cannot write {out}: {str(error)[:200]}; choose another folder") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    shutil.rmtree(before, ignore_errors=True)  # only now that another one is in its place


def lance_reader(out: Path) -> Callable[[npt.NDArray[np.int64]], npt.NDArray[Any]]:
    """What reads the features of rows of a Lance data set."""
    data = import_module("lance").dataset(str(out))
    shape = json.loads(data.schema.field("features").metadata[_SHAPE])

    def at(rows: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        column = data.take(rows.tolist(), columns=["features"])["features"].combine_chunks()
        values: npt.NDArray[Any] = column.flatten().to_numpy(zero_copy_only=False)
        return values.reshape(len(rows), *shape)

    return at


def _batches(first: pa.Table, rest: Iterable[pa.Table], shape: tuple[int, ...]) -> Iterator[pa.RecordBatch]:
    yield from first.to_batches()
    for table in rest:
        yield from _flat(table, shape).to_batches()


def _replace(part: Path, out: Path, before: Path) -> None:
    """Let a folder take the place of another one, which stays where it cannot, and where somebody stops it."""
    try:
        if out.exists():
            out.rename(before)
        part.rename(out)
    except BaseException:
        if before.exists() and not out.exists():
            before.rename(out)
        raise


def _flat(table: pa.Table, shape: tuple[int, ...]) -> pa.Table:
    """The table with its tensors as lists of one length, as Lance's searches for neighbours take them."""
    column = table["features"]
    kind = pa.list_(column.type.value_type, math.prod(shape))
    lists = pa.chunked_array([chunk.storage.cast(kind) for chunk in column.chunks], kind)
    field = pa.field("features", kind, metadata={_SHAPE: json.dumps(list(shape)).encode()})
    return table.set_column(table.schema.get_field_index("features"), field, lists)


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
        SettingError: the name ends in none of the known suffixes, a package is missing, or something else lies there.
    """
    if out.suffix not in (*_SUFFIXES, LANCE):
        raise SettingError(f"{out.name} must end in {', '.join(_SUFFIXES)} or {LANCE}, which says what to write")
    if out.suffix == LANCE:
        _check_lance()
    is_lance = out.suffix == LANCE and (out / "_versions").is_dir()
    if out.is_dir() and any(out.iterdir()) and not is_lance:
        raise SettingError(f"{out} is a folder that holds something else: choose another name")
    if out.suffix == LANCE and out.is_file():
        raise SettingError(f"{out} is a file, and a Lance data set is a folder: choose another name")


def write_features(out: Path, tables: Iterable[pa.Table], contents: Contents) -> None:
    """Write the file in one step, in the format that its suffix names.

    Args:
        out: the file.
        tables: the tables in order; each has ``id``, ``label`` and ``features``, and one is in memory at a time.
        contents: contents of all of them together.

    Raises:
        OutOfSpace: the disk is full.
        SettingError: the folder cannot be written.
    """
    if out.suffix == LANCE:
        _write_lance(out, tables, contents.shape)
        return
    with atomic_file(out) as file:
        _SUFFIXES[out.suffix](file, tables, contents)


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
        labels.append(label_numbers(table["label"]))  # a tensor has no null
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


LANCE = ".lance"
"""The suffix of a Lance data set, which is a folder."""

_SUFFIXES = {".parquet": _write_parquet, ".safetensors": _write_safetensors}
"""Writers of files, by the suffix that asks for them."""
