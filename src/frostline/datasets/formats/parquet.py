"""Parquet files with a column of images or texts, as Hugging Face keeps data sets: samples are cells, read in place."""

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from frostline.core import CELLS
from frostline.datasets.formats.base import ListedSamples, digest_of, is_hidden
from frostline.datasets.formats.labels import (
    LABEL_FIELDS,
    NO_CLASSES,
    URL_FIELDS,
    classified,
    column_name,
    joined,
    no_class,
)
from frostline.datasets.formats.split_names import with_splits
from frostline.datasets.formats.tables import SAID, Parts, finished, known_parts, plain
from frostline.datasets.formats.targets import MASK_FIELDS, NO_MASK, Mask, target_columns
from frostline.datasets.parquet.cells import Cell, cells_of, leaf, opened
from frostline.errors import DataError, EmptyDataset
from frostline.preprocess.decoder import size_of
from frostline.stores.base.protocols import Entry, ObjectStore, Versioned, is_other_version

__all__ = ("ColumnRoles", "Parquet", "columns_of_schema", "is_label", "is_parquet", "is_scalar")

# Where no words say it: what image columns are called, and then the first that could be one.
_IMAGE_NAMES = ("image", "img", "jpg", "jpeg", "png", "webp", "image_bytes", "bytes", "data")

# Where labels are images, they are masks.
_MASK_NAMES = (*MASK_FIELDS, *LABEL_FIELDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnRoles:
    """What the columns of a file are.

    Attributes:
        image: path of the leaf with the encoded images, or with what else the samples are.
        mask: path of the leaf with the encoded masks; None where no column is one.
        label: name of the column; None where no column is one.
        other: name of a column that is called as labels are and holds something else; None where none is.
        classes: names that a label's number stands for; empty where it is its own.
        about: scalar columns beside them.
    """

    image: str
    mask: str | None
    label: str | None
    other: str | None
    classes: tuple[str, ...]
    about: tuple[str, ...]


def columns_of_schema(schema: pa.Schema, column: str | None = None) -> ColumnRoles | None:
    """What the columns are; None where none can hold samples, or the chosen one cannot.

    Args:
        schema: schema of the file; the metadata of Hugging Face's ``datasets`` names images, labels and classes.
        column: name of the column with the samples, of texts or of binary; by default the one with images.
    """
    features = _features(schema)
    leaves = {field.name: path for field in schema if (path := _image_leaf(field)) is not None}
    named = [name for name in leaves if _kind(features.get(name)) == "Image"]
    likely = [*named, *(name for name in _IMAGE_NAMES if name in leaves), *leaves]
    image = next(iter([*(name for name in likely if name not in _MASK_NAMES), *likely]), None)
    if column is not None:
        image, chosen = column, _chosen_leaf(schema, column)
        leaves = {} if chosen is None else {column: chosen}
    if image not in leaves:
        return None
    mask = next((name for name in _MASK_NAMES if name in leaves and name != image), None)
    numbered = [name for name in schema.names if _kind(features.get(name)) == "ClassLabel"]
    wanted = [*(name for name in LABEL_FIELDS if name in numbered), *numbered, *LABEL_FIELDS]
    can_be = {name for name in schema.names if name != image and is_label(schema.field(name).type)}
    label = next((name for name in wanted if name in can_be), None)
    other = next((name for name in LABEL_FIELDS if name not in leaves and _is_other(schema, name)), None)
    about = tuple(field.name for field in schema if is_scalar(field.type) and field.name not in (label, image))
    classes = features[label].get("names") if label is not None and label in numbered else None
    names = tuple(map(str, classes)) if isinstance(classes, list) else ()
    return ColumnRoles(
        image=leaves[image],
        mask=None if mask is None else leaves[mask],
        label=label,
        other=other if label is None else None,
        classes=names,
        about=about,
    )


def _features(schema: pa.Schema) -> dict[str, Any]:
    try:
        said = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
        features = said["info"]["features"]
        return features if isinstance(features, dict) else {}
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}


def _kind(feature: Any) -> str | None:
    return feature.get("_type") if isinstance(feature, dict) else None


def _image_leaf(field: pa.Field) -> str | None:
    if _is_binary(field.type):
        return str(field.name)
    if pa.types.is_struct(field.type) and field.type.get_field_index("bytes") >= 0:
        return f"{field.name}.bytes" if _is_binary(field.type.field("bytes").type) else None
    return None


def _chosen_leaf(schema: pa.Schema, column: str) -> str | None:
    if schema.names.count(column) != 1:
        return None
    field = schema.field(column)
    return column if _is_text(field.type) else _image_leaf(field)


def _is_binary(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def is_label(kind: pa.DataType) -> bool:
    """Whether a column of that type can say labels."""
    plain = kind.value_type if pa.types.is_dictionary(kind) else kind
    return pa.types.is_integer(plain) or pa.types.is_boolean(plain) or _is_text(plain)


def _is_other(schema: pa.Schema, name: str) -> bool:
    return name in schema.names and not pa.types.is_null(schema.field(name).type)


def is_scalar(kind: pa.DataType) -> bool:
    """Whether a column of that type can be metadata."""
    plain = kind.value_type if pa.types.is_dictionary(kind) else kind
    return pa.types.is_integer(plain) or pa.types.is_floating(plain) or pa.types.is_boolean(plain) or _is_text(plain)


_RULE = "frostline parquet 3"
# Files read at once: each holds a row group of images while their sizes are looked at.
_THREADS = 4
# What Hugging Face writes for a sample without a class, where classes have names.
_NO_CLASS = -1


class _File(NamedTuple):
    table: pa.Table
    classes: tuple[str, ...]


class Parquet:
    """Files with images as ``struct{bytes, path}`` or plain binary, or a column of texts, and a label beside them.

    What the schema's ``huggingface`` metadata says of columns and classes holds. Parquet tells the size of no cell but
    with its page, so the first listing reads the column of images once, a row group at a time; of a file that did not
    change only the end is read again. Scalar columns become metadata. A second column of images, called ``mask``,
    ``segmentation``, ``annotation`` or ``label``, is that of the masks. Files whose names or folders say ``train``,
    ``val``, ``test`` or the like are splits (``formats.split_names``).

    Args:
        column: name of the column with the samples; by default the one with images. The format's name then has it
            behind a colon, as in ``parquet:text``, so that nodes and manifests agree on it.
    """

    is_incremental = True

    def __init__(self, column: str | None = None) -> None:
        self.name = "parquet" if column is None else f"parquet:{column}"
        self._column = column

    def claims(self, entries: Sequence[Entry]) -> bool:
        """See ``Format.claims``: one Parquet file is enough."""
        return any(map(is_parquet, entries))

    def digest(self, entries: Sequence[Entry]) -> str:
        """See ``Format.digest``."""
        rule = _RULE if self._column is None else f"{_RULE} {self._column}"
        return digest_of(rule, filter(is_parquet, entries))

    def read(self, store: ObjectStore, entries: Sequence[Entry], before: ListedSamples | None = None) -> ListedSamples:
        """See ``Format.read``."""
        found = sorted(filter(is_parquet, entries))
        if not found:
            raise EmptyDataset(f"{store.url} holds no Parquet files (such as train.parquet)")
        known = known_parts(before, cells_of)
        with ThreadPoolExecutor(_THREADS, "frostline-index") as threads:
            files = list(threads.map(partial(_read, store, known, self._column), found))
        tables = [file.table for file in files]
        table, is_divided = with_splits(joined(tables), [entry.object for entry in found], list(map(len, tables)))
        if not len(table):
            raise EmptyDataset(f"not one row of the {len(files)} Parquet files at {store.url} holds a sample")
        names = {file.classes for file in files if file.classes}
        labels, classes = classified(table[SAID].to_pylist(), names.pop() if len(names) == 1 else ())
        return ListedSamples(
            table=finished(table, labels),
            classes=classes,
            digest=self.digest(entries),
            reading=CELLS,
            divided_by_names=is_divided,
        )


def is_parquet(entry: Entry) -> bool:
    """Whether an object is a Parquet file by its name, and not hidden."""
    return entry.object.lower().endswith(".parquet") and not is_hidden(entry.object)


def _read(store: Versioned, known: Parts, column: str | None, entry: Entry) -> _File:
    with opened(store, entry.object, entry.size) as (parquet, source):
        columns = columns_of_schema(parquet.schema_arrow, column)
        if columns is None:
            raise DataError(_lacks(entry, parquet.schema_arrow, column))
        if columns.other is not None:
            kind = parquet.schema_arrow.field(columns.other).type
            raise DataError(f"{entry.object} has a column {columns.other!r} of the type {kind}, and {NO_CLASSES}")
        if entry.etag and (entry.object, entry.etag) in known:
            return _File(known[entry.object, entry.etag], columns.classes)
        table = _table(parquet, entry, columns)
    if is_other_version(entry.etag, source.version):
        raise DataError(f"{entry.object} changed while it was read: ask again when nobody writes to it")
    return _File(table, columns.classes)


def _lacks(entry: Entry, schema: pa.Schema, column: str | None) -> str:
    names = ", ".join(schema.names)[:200]
    if column is not None:
        return f"{entry.object} has no column {column!r} of texts or of binary values; its columns are {names}"
    return (
        f"{entry.object} has no column of images: one is binary, or a struct with the binary field 'bytes'; "
        f"its columns are {names}{_hint(schema)}"
    )


def _hint(schema: pa.Schema) -> str:
    texts = [field.name for field in schema if _is_text(field.type)]
    url = next((name for name in URL_FIELDS if name in texts), None)
    if url is not None:
        return f"; if {url} says where images are, name the form: form='urls', or --form urls"
    return f"; if samples are the texts in {texts[0]}, name the column: column={texts[0]!r}" if texts else ""


def _table(parquet: pq.ParquetFile, entry: Entry, columns: ColumnRoles) -> pa.Table:
    lengths = _lengths(parquet, columns.image)
    wanted = [*columns.about, *([columns.label] if columns.label else [])]
    beside = parquet.read(columns=wanted, use_threads=False) if wanted else None
    rows = len(lengths)
    said = _said(entry, columns, beside[columns.label]) if beside and columns.label else pa.nulls(rows, pa.string())
    places = pa.array(range(rows), pa.int64())
    table = pa.table(
        {
            "name": pa.array([f"{entry.object}/{row}" for row in range(rows)], pa.string()),
            "object": pa.array([str(Cell.of(entry, columns.image))] * rows, pa.string()),
            "offset": places,
            "length": lengths,
            "etag": pa.array([entry.etag] * rows, pa.string()),
            SAID: said,
            **({column_name(name): plain(beside[name]) for name in columns.about} if beside else {}),
            **(_targets(parquet, entry, columns.image, columns.mask) if columns.mask else {}),
        }
    )
    return table.filter(pc.is_valid(lengths))


def _targets(parquet: pq.ParquetFile, entry: Entry, image: str, mask: str) -> dict[str, pa.Array]:
    cell = str(Cell.of(entry, mask))
    lengths = pc.fill_null(_lengths(parquet, mask), 0).to_pylist()
    masks = [Mask(cell, row, length, entry.etag) if length else NO_MASK for row, length in enumerate(lengths)]
    sizes = [
        size_of(cell.as_buffer()) if cell.is_valid and length else (0, 0)
        for column in _groups(parquet, image)
        for cell, length in zip(column, lengths, strict=False)
    ]
    return target_columns(masks, sizes)


def _lengths(parquet: pq.ParquetFile, path: str) -> pa.ChunkedArray:
    found = [pc.cast(pc.binary_length(column), pa.int64()) for column in _groups(parquet, path)]
    return pa.chunked_array([chunk for column in found for chunk in column.chunks], pa.int64())


def _groups(parquet: pq.ParquetFile, path: str) -> Iterator[pa.ChunkedArray]:
    """A column, a row group at a time."""
    for group in range(parquet.num_row_groups):
        yield leaf(parquet.read_row_group(group, columns=[path], use_threads=False).column(0))


def _said(entry: Entry, columns: ColumnRoles, labels: pa.ChunkedArray) -> pa.ChunkedArray:
    values = plain(labels)
    if pa.types.is_boolean(values.type):
        return pc.if_else(values, "True", "False")
    if not columns.classes or not pa.types.is_integer(values.type):
        return values.cast(pa.string())
    greatest = pc.max(values).as_py()
    if greatest is not None and greatest >= len(columns.classes):
        raise DataError(f"{entry.object} has a label {greatest} and names for {len(columns.classes)} classes only")
    least = pc.min(values).as_py()
    if least is not None and least < _NO_CLASS:
        raise DataError(f"{entry.object}: {no_class(str(least))}")
    numbers = pc.if_else(pc.greater_equal(values, 0), values, pa.scalar(None, values.type))
    return pa.chunked_array([pa.array(columns.classes, pa.string()).take(numbers.combine_chunks())])
