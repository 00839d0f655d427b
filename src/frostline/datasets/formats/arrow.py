"""Arrow files, as ``save_to_disk`` of Hugging Face's ``datasets`` writes them: encoded images are ranges of them."""

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from frostline.datasets.formats.arrow_batches import ArrowStream, CellPositions, StreamedBatch
from frostline.datasets.formats.base import ListedSamples, digest_of, is_hidden
from frostline.datasets.formats.column_roles import ColumnRoles, labels_said, roles_in
from frostline.datasets.formats.labels import column_name, joined, labelled
from frostline.datasets.formats.lists import short_lists
from frostline.datasets.formats.ranges import ObjectRanges
from frostline.datasets.formats.split_names import with_splits
from frostline.datasets.formats.tables import SAID, Parts, finished, known_parts, plain
from frostline.datasets.formats.targets import NO_MASK, Mask, size_at, target_columns
from frostline.errors import EmptyDataset
from frostline.stores.base.protocols import Entry, ObjectStore, Versioned

__all__ = ("ArrowFiles", "splits_of_folders")

_RULE = "frostline arrow 1"
# Files indexed at once: each waits for its store most of the time.
_THREADS = 16
# Results of ``map`` that ``datasets`` keeps beside the data: the same samples again, or other ones.
_LEFT_BEHIND = ("cache-", "tmp", "indices")
_SPLIT_FOLDERS = "dataset_dict.json"


class _File(NamedTuple):
    table: pa.Table
    classes: tuple[str, ...]


class ArrowFiles:
    """Streams of record batches with images as ``struct{bytes, path}`` or plain binary, and labels, as in Parquet.

    Images lie in such files as they are encoded, so that each is read as a range of its file. Of a file only the
    headers of its batches and the columns beside the images are read to find them. A folder with a
    ``dataset_dict.json`` has a folder for each split; elsewhere the names of files and folders may say splits
    (``formats.split_names``).
    """

    name = "arrow"
    is_incremental = True

    def claims(self, entries: Sequence[Entry]) -> bool:
        """See ``Format.claims``: one Arrow file is enough."""
        return any(map(_is_arrow, entries))

    def digest(self, entries: Sequence[Entry]) -> str:
        """See ``Format.digest``."""
        return digest_of(_RULE, (entry for entry in entries if _is_arrow(entry) or _says_splits(entry.object)))

    def read(self, store: ObjectStore, entries: Sequence[Entry], before: ListedSamples | None = None) -> ListedSamples:
        """See ``Format.read``; of a file that did not change only the beginning is read again.

        Where images have masks, their heads are read too: a mask must be as large as its image.
        """
        found = sorted(filter(_is_arrow, entries))
        if not found:
            raise EmptyDataset(f"{store.url} holds no Arrow files (such as data-00000-of-00001.arrow)")
        known = known_parts(before)
        with ThreadPoolExecutor(_THREADS, "frostline-index") as threads, ThreadPoolExecutor(_THREADS) as heads:
            files = list(threads.map(partial(_read, store, known, heads), found))
        tables, names = [file.table for file in files], [entry.object for entry in found]
        said = splits_of_folders(names, (entry.object for entry in entries))
        table, is_divided = with_splits(joined(tables), names, list(map(len, tables)), said)
        if not len(table):
            raise EmptyDataset(
                f"not one row of the {len(files)} Arrow files at {store.url} holds an image; where rows say "
                "paths alone, write the data again with the images in it, as save_to_disk does by default"
            )
        known_names = {file.classes for file in files if file.classes}
        labels = labelled(table[SAID].to_pylist(), known_names.pop() if len(known_names) == 1 else ())
        return ListedSamples(
            table=finished(table, labels),
            classes=labels.classes,
            digest=self.digest(entries),
            divided_by_names=is_divided,
        )


def splits_of_folders(files: Sequence[str], names: Iterable[str]) -> dict[str, str] | None:
    """The split of each file that lies in a folder of a ``DatasetDict``; None where there is no such folder.

    Args:
        files: files with samples.
        names: names of all objects, among which one says that its folder has a folder for each split.
    """
    roots = [name.removesuffix(_SPLIT_FOLDERS) for name in names if _says_splits(name)]
    found: dict[str, str] = {}
    for root in roots:
        inside = ((file, file[len(root) :].partition("/")) for file in files if file.startswith(root))
        found |= {file: folder for file, (folder, slash, _) in inside if slash}
    return found or None


def _says_splits(name: str) -> bool:
    return name.rpartition("/")[2] == _SPLIT_FOLDERS and not is_hidden(name)


def _is_arrow(entry: Entry) -> bool:
    base = entry.object.rpartition("/")[2].lower()
    return base.endswith(".arrow") and not base.startswith(_LEFT_BEHIND) and not is_hidden(entry.object)


def _read(store: Versioned, known: Parts, heads: ThreadPoolExecutor, entry: Entry) -> _File:
    stream = ArrowStream(ObjectRanges(store, entry), entry.object, entry.size)
    columns = roles_in(entry.object, stream.schema)
    if entry.etag and (entry.object, entry.etag) in known:
        return _File(known[entry.object, entry.etag], columns.classes)
    tables, row = [_schema_of(stream.schema, columns, entry)], 0
    for batch in stream.batches():
        tables.append(_table(store, heads, entry, columns, batch, row))
        row += len(batch)
    return _File(pa.concat_tables(tables, promote_options="permissive"), columns.classes)


def _schema_of(schema: pa.Schema, columns: ColumnRoles, entry: Entry) -> pa.Table:
    """The table of a file without batches."""
    beside = pa.table({name: pa.chunked_array([], schema.field(name).type) for name in _beside(columns)})
    none = np.empty(0, np.int64)
    places = CellPositions(offsets=none, lengths=none, valid=none.astype(bool))
    return _columns(entry, columns, places, beside, 0)


def _beside(columns: ColumnRoles) -> tuple[str, ...]:
    named = (*columns.about, columns.label, columns.other, *(path.partition(".")[0] for path in columns.lists))
    images = {path.partition(".")[0] for path in (columns.image, columns.mask) if path is not None}
    return tuple(dict.fromkeys(name for name in named if name is not None and name not in images))


def _table(
    store: Versioned, heads: ThreadPoolExecutor, entry: Entry, columns: ColumnRoles, batch: StreamedBatch, row: int
) -> pa.Table:
    # In the order in which they lie there, so that reading goes on and does not go back.
    places = batch.cells(columns.image)
    beside = pa.table({name: batch.column(name) for name in _beside(columns)})
    table = _columns(entry, columns, places, beside, row)
    if columns.mask is not None:
        for name, column in _targets(store, heads, entry, places, batch.cells(columns.mask)).items():
            table = table.append_column(name, column)
    return table.filter(pa.array(places.valid))


def _columns(entry: Entry, columns: ColumnRoles, places: CellPositions, beside: pa.Table, row: int) -> pa.Table:
    rows = len(places.offsets)
    said = labels_said(entry.object, columns, beside) if beside.num_columns else pa.nulls(rows, pa.string())
    lists = short_lists(beside, columns.lists)
    return pa.table(
        {
            "name": pa.array([f"{entry.object}/{number}" for number in range(row, row + rows)], pa.string()),
            "object": pa.array([entry.object] * rows, pa.string()),
            "offset": pa.array(places.offsets),
            "length": pa.array(places.lengths),
            "etag": pa.array([entry.etag] * rows, pa.string()),
            SAID: said,
            **{column_name(name): plain(beside[name]) for name in columns.about},
            **{column_name(name): column for name, column in lists.items()},
        }
    )


def _targets(
    store: Versioned, heads: ThreadPoolExecutor, entry: Entry, images: CellPositions, masks: CellPositions
) -> dict[str, pa.Array]:
    there = masks.valid & (masks.lengths > 0)
    found = [
        Mask(entry.object, offset, length, entry.etag) if is_there else NO_MASK
        for offset, length, is_there in zip(masks.offsets.tolist(), masks.lengths.tolist(), there, strict=True)
    ]

    def size(row: int) -> tuple[int, int]:
        if not there[row] or not images.valid[row]:
            return 0, 0
        return size_at(store, entry.object, int(images.offsets[row]), int(images.lengths[row]))

    return target_columns(found, list(heads.map(size, range(len(found)))))
