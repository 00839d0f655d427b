"""Writes features as a Lance data set, which is a folder, and reads rows of one."""

import json
import math
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from frostline.errors import OutOfSpace, SettingError

__all__ = ("check_lance", "lance_reader", "write_lance")

_SHAPE = b"shape"
_FULL = ("no space left", "disk quota exceeded")


def check_lance() -> None:
    """Do nothing if the package is there. It is not imported yet, since it warns of every fork from then on.

    Raises:
        SettingError: it is missing.
    """
    if find_spec("lance") is None:
        raise SettingError(
            "a name that ends in .lance needs the package pylance, which is not installed: pip install "
            "'frostline[lance]', or write .parquet or .safetensors"
        )


def write_lance(out: Path, tables: Iterable[pa.Table], shape: tuple[int, ...]) -> None:
    """Write a Lance data set that takes its place in one step.

    Args:
        out: its folder.
        tables: in order; one is in memory at a time.
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
        if out.exists():
            out.rename(before)
        part.rename(out)
    except OSError as error:
        if any(words in str(error).lower() for words in _FULL):
            raise OutOfSpace(f"no space left to write {out}: free some, or choose another folder") from error
        raise SettingError(f"cannot write {out}: {str(error)[:200]}; choose another folder") from error
    finally:
        for folder in (part, before):
            shutil.rmtree(folder, ignore_errors=True)


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


def _flat(table: pa.Table, shape: tuple[int, ...]) -> pa.Table:
    """The table with its tensors as lists of one length, as Lance's searches for neighbours take them."""
    column = table["features"]
    kind = pa.list_(column.type.value_type, math.prod(shape))
    lists = pa.chunked_array([chunk.storage.cast(kind) for chunk in column.chunks], kind)
    field = pa.field("features", kind, metadata={_SHAPE: json.dumps(list(shape)).encode()})
    return table.set_column(table.schema.get_field_index("features"), field, lists)
