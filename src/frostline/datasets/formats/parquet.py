"""Parquet files with a column of images or texts, as Hugging Face keeps data sets: samples are cells, read in place."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial, reduce
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from frostline.core import CELLS
from frostline.datasets.formats.base import ListedSamples, digest_of, is_hidden
from frostline.datasets.formats.column_roles import ColumnRoles, labels_said, roles_of_parts
from frostline.datasets.formats.labels import column_name, joined, labelled
from frostline.datasets.formats.lists import list_columns
from frostline.datasets.formats.split_names import with_splits
from frostline.datasets.formats.tables import SAID, Parts, finished, known_parts, plain
from frostline.datasets.formats.targets import NO_MASK, Mask, target_columns
from frostline.datasets.parquet.cells import Cell, cells_of, leaf, opened
from frostline.errors import DataError, EmptyDataset
from frostline.preprocess.decoder import size_of
from frostline.preprocess.named_inputs import record_bytes
from frostline.stores.base.protocols import Entry, ObjectStore, Versioned, is_other_version

__all__ = ("Parquet", "is_parquet")

_RULE = "frostline parquet 4"
# Files read at once: each holds a row group of images while their sizes are looked at.
_THREADS = 4


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
        column: name of the column with the samples, or those of their parts by the inputs that are made of them
            (``columns_in_text``); by default the one with images. The format's name then has it behind a colon, as in
            ``parquet:text``, so that nodes and manifests agree on it.
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
        said = labelled(table[SAID].to_pylist(), names.pop() if len(names) == 1 else ())
        return ListedSamples(
            table=finished(table, said),
            classes=said.classes,
            digest=self.digest(entries),
            reading=CELLS,
            divided_by_names=is_divided,
        )


def is_parquet(entry: Entry) -> bool:
    """Whether an object is a Parquet file by its name, and not hidden."""
    return entry.object.lower().endswith(".parquet") and not is_hidden(entry.object)


def _read(store: Versioned, known: Parts, column: str | None, entry: Entry) -> _File:
    with opened(store, entry.object, entry.size) as (parquet, source):
        columns, paths = roles_of_parts(entry.object, parquet.schema_arrow, column)
        if entry.etag and (entry.object, entry.etag) in known:
            return _File(known[entry.object, entry.etag], columns.classes)
        table = _table(parquet, entry, columns, paths)
    if is_other_version(entry.etag, source.version):
        raise DataError(f"{entry.object} changed while it was read: ask again when nobody writes to it")
    return _File(table, columns.classes)


def _table(parquet: pq.ParquetFile, entry: Entry, columns: ColumnRoles, paths: Sequence[str]) -> pa.Table:
    lengths = _record_lengths(parquet, paths)
    wanted = [name for name in (*columns.about, columns.label, columns.other) if name is not None]
    beside = parquet.read(columns=wanted, use_threads=False) if wanted else None
    rows = len(lengths)
    said = pa.nulls(rows, pa.string()) if beside is None else labels_said(entry.object, columns, beside)
    lists = list_columns(parquet, columns.lists)
    places = pa.array(range(rows), pa.int64())
    table = pa.table(
        {
            "name": pa.array([f"{entry.object}/{row}" for row in range(rows)], pa.string()),
            "object": pa.array([str(Cell.of(entry, *paths))] * rows, pa.string()),
            "offset": places,
            "length": lengths,
            "etag": pa.array([entry.etag] * rows, pa.string()),
            SAID: said,
            **({column_name(name): plain(beside[name]) for name in columns.about} if beside else {}),
            **{column_name(name): column for name, column in lists.items()},
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


def _record_lengths(parquet: pq.ParquetFile, paths: Sequence[str]) -> pa.ChunkedArray:
    """Bytes of each sample; null where one of its parts is missing."""
    lengths = [_lengths(parquet, path) for path in paths]
    return lengths[0] if len(lengths) == 1 else reduce(pc.add, lengths, pa.scalar(record_bytes(len(paths))))


def _groups(parquet: pq.ParquetFile, path: str) -> Iterator[pa.ChunkedArray]:
    """A column, a row group at a time."""
    for group in range(parquet.num_row_groups):
        yield leaf(parquet.read_row_group(group, columns=[path], use_threads=False).column(0))
