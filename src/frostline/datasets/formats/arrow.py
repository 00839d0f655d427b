"""Arrow files of Hugging Face's ``datasets``: encoded images are found as ranges of them and read in place."""

import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from frostline.core import OBJECTS, URLS
from frostline.core.errors import DataError, EmptyDataset
from frostline.datasets.formats.base import (
    ListedSamples,
    column_at,
    column_of,
    column_paths,
    digest_of,
)
from frostline.datasets.formats.contradictions import contradictions_of_partitions
from frostline.datasets.formats.folders import NO_MASK, Mask, is_sample, size_at, target_columns
from frostline.datasets.formats.joining import with_partitions
from frostline.datasets.formats.labels import column_name, encode_labels, join_tables, with_splits
from frostline.datasets.formats.left_out import LeftOut, is_hidden
from frostline.datasets.formats.ranges import ObjectRanges, check_written_out, short_lists
from frostline.datasets.formats.tables import (
    LOOKED_AT,
    SAID,
    ColumnRoles,
    TableFile,
    finish_table,
    label_texts,
    may_name_classes,
    names_of_columns,
    omissions_of_table,
    path_leaf,
    plain_column,
    roles_in,
    with_names_for_masks,
)
from frostline.datasets.formats.urls import IMAGE_PATH, MASK_PATH, known_files, locate_rows, with_known_files
from frostline.stores.protocols import Entry, ObjectStore, Versioned
from frostline.stores.urls import ARROW_SUFFIXES

__all__ = (
    "ArrowFiles",
    "ArrowStream",
    "CellPositions",
    "StreamedBatch",
    "splits_of_folders",
)


_PREFIX_BYTES = 8
# What stands before the stream in a file that can also be entered in its middle, such as Feather's.
_MAGIC = b"ARROW1\0\0"
_CONTINUED = 0xFFFFFFFF
# Of a column that is read, at once.
_PIECE = 8 << 20
# Field of the message's table that says how long its body is; two sizes stand before the fields' places.
_BODY_LENGTH = 4 + 2 * 3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CellPositions:
    """Where the cells of one column of a batch lie in the file.

    Attributes:
        offsets: offset of each cell's first byte, ``int64[rows]``.
        lengths: length of each cell in bytes, likewise.
        valid: false where there is none, ``bool[rows]``.
    """

    offsets: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    valid: npt.NDArray[np.bool_]


class ArrowStream:
    """A stream of record batches in a file that is read by ranges. For one thread.

    Args:
        ranges: the file.
        name: name of the file, for the sentences.
        size: size of the file in bytes.

    Attributes:
        name: name of the file.
        schema: schema of its columns.

    Raises:
        DataError: The file does not begin as a stream does, or was changed since it was listed.
        StoreError: the store failed.
    """

    def __init__(self, ranges: ObjectRanges, name: str, size: int) -> None:
        self._ranges = ranges
        self.name = name
        self._size = size
        self._place = len(_MAGIC) if ranges.at(0, len(_MAGIC)) == _MAGIC else 0
        with _said(name):
            head = self._head()
            self.schema = pa.ipc.read_schema(pa.py_buffer(head))
            names = self.schema.names
        if len(set(names)) < len(names):
            raise DataError(f"{name} has two columns of one name: give each its own, of {', '.join(names)[:200]}")
        self._place += len(head)

    def batches(self) -> "Iterator[StreamedBatch]":
        """The record batches in their order, of which nothing but the headers is read.

        Raises:
            DataError: the file is cut off, damaged or compressed, or columns are dictionaries.
            StoreError: the store failed.
        """
        while head := self._head():
            with _said(self.name):
                body = _body_length(head)
                if not 0 <= body <= self._size - self._place - len(head):
                    raise DataError(_cut_off(self.name))
                # Nothing of it is in memory before it is written to or read.
                memory = np.zeros(len(head) + body, np.uint8)
                memory[: len(head)] = np.frombuffer(head, np.uint8)
                message = pa.ipc.read_message(pa.BufferReader(pa.py_buffer(memory)))
                if message.type == "dictionary":
                    raise DataError(
                        f"{self.name} has columns that are dictionaries, which are not read in place: write it again "
                        "with plain columns, or as Parquet"
                    )
                batch = pa.ipc.read_record_batch(message, self.schema)
            yield StreamedBatch(self, batch, memory, self._place)
            self._place += len(memory)

    def _head(self) -> bytes:
        """The next message's prefix and metadata; empty at the end of the stream."""
        prefix = self._ranges.at(self._place, _PREFIX_BYTES)
        if len(prefix) < _PREFIX_BYTES:
            raise DataError(_cut_off(self.name))
        mark, size = struct.unpack("<Ii", prefix)
        if mark != _CONTINUED or size < 0:
            raise DataError(f"{self.name} is no Arrow file, or is damaged: make it again or take it away")
        head = self._ranges.at(self._place, _PREFIX_BYTES + size) if size else b""
        if size and len(head) < _PREFIX_BYTES + size:
            raise DataError(_cut_off(self.name))
        return head

    def fill(self, memory: npt.NDArray[np.uint8], start: int, buffers: Iterable[pa.Buffer]) -> None:
        """Read buffers of a batch into the memory that they are views of.

        Args:
            memory: memory of the whole message.
            start: the place where the message begins in the file.
            buffers: buffers to read.

        Raises:
            DataError: a buffer lies elsewhere, as decompressed ones do.
            StoreError: the store failed.
        """
        for buffer in buffers:
            first = self.place_in(memory, buffer)
            for place in range(first, first + buffer.size, _PIECE):
                length = min(_PIECE, first + buffer.size - place)
                memory[place : place + length] = np.frombuffer(self._ranges.at(start + place, length), np.uint8)

    def place_in(self, memory: npt.NDArray[np.uint8], buffer: pa.Buffer) -> int:
        """Where a buffer begins in the memory of its message; raises ``DataError`` where it lies elsewhere."""
        place = int(buffer.address) - memory.ctypes.data
        if not 0 <= place <= place + buffer.size <= len(memory):
            raise DataError(
                f"{self.name} is compressed, and compressed batches cannot be read at an offset: write it again "
                "without compression, as save_to_disk does, or as Parquet"
            )
        return place


class StreamedBatch:
    """A record batch whose columns are read when they are asked for; see ``ArrowStream.batches``."""

    def __init__(self, stream: ArrowStream, batch: pa.RecordBatch, memory: npt.NDArray[np.uint8], start: int) -> None:
        self._stream = stream
        self._batch = batch
        self._memory = memory
        self._start = start

    def __len__(self) -> int:
        return int(self._batch.num_rows)

    @property
    def names(self) -> Sequence[str]:
        """The names of the columns."""
        return tuple(self._batch.schema.names)

    def column(self, name: str) -> pa.Array:
        """A column's values.

        Raises:
            DataError: The column's values are damaged or compressed.
            StoreError: the store failed.
        """
        column = self._batch.column(name)
        self._read(column.buffers())
        with _said(self._stream.name):
            column.validate(full=True)
        return column

    def cells(self, path: str) -> CellPositions:
        """Where the cells of a column of binary values lie.

        Args:
            path: name of the column, with ``.bytes`` behind it where that is the field of a struct.

        Raises:
            DataError: The column's offsets are damaged or compressed.
            StoreError: the store failed.
        """
        is_plain = path in self._batch.schema.names
        column = self._batch.column(path if is_plain else path.rpartition(".")[0])
        inner = column if is_plain else column.field("bytes")
        bits, places, data = inner.buffers()
        self._read([bits, places, *([] if is_plain else column.buffers()[:1])])
        width = np.dtype(np.int64 if pa.types.is_large_binary(inner.type) else np.int32)
        ends = np.frombuffer(places or b"", width, (places.size if places else 0) // width.itemsize)
        ends = ends[: len(self) + 1].astype(np.int64) if len(self) else np.zeros(1, np.int64)
        size = data.size if data else 0
        if len(ends) != len(self) + 1 or ends[0] < 0 or (np.diff(ends) < 0).any() or ends[-1] > size:
            raise DataError(_damaged(self._stream.name))
        first = self._start + (self._stream.place_in(self._memory, data) if size else 0)
        valid = np.asarray(column.is_valid()) & np.asarray(inner.is_valid())
        return CellPositions(offsets=first + ends[:-1], lengths=np.diff(ends), valid=valid)

    def paths(self, leaf: str, is_empty: npt.NDArray[np.bool_]) -> pa.Array | None:
        """The paths that rows say in the place of a leaf's contents; None where no row says one.

        Args:
            leaf: path of the leaf with the contents.
            is_empty: true where a row holds none.

        Raises:
            DataError: The paths are damaged or compressed.
            StoreError: the store failed.
        """
        path = path_leaf(self._batch.schema, leaf)
        if path is None or not is_empty.any():
            return None
        column = self._batch.column(path.rpartition(".")[0])
        inner = column.field("path")
        self._read([*column.buffers()[:1], *inner.buffers()])
        with _said(self._stream.name):
            inner.validate(full=True)
            texts = inner.cast(pa.string())
        wanted = is_empty & np.asarray(column.is_valid()) & np.asarray(pc.not_equal(pc.fill_null(texts, ""), ""))
        return pc.if_else(pa.array(wanted), texts, pa.scalar(None, pa.string())) if wanted.any() else None

    def _read(self, buffers: Iterable[Any]) -> None:
        # Empty ones lie anywhere.
        self._stream.fill(self._memory, self._start, [buffer for buffer in buffers if buffer and buffer.size])


@contextmanager
def _said(name: str) -> Iterator[None]:
    try:
        yield
    except MemoryError:  # Arrow's is one of its own errors too, and says nothing of the file
        raise
    except (pa.ArrowException, OSError, struct.error, UnicodeDecodeError) as error:
        raise DataError(_damaged(name)) from error


def _damaged(name: str) -> str:
    return f"{name} is no Arrow file, or is compressed or damaged: make it again, without compression"


def _cut_off(name: str) -> str:
    return f"{name} is cut off or damaged: its last message is no end of an Arrow stream; make it again"


def _body_length(head: bytes) -> int:
    """How many bytes follow a message's metadata, from its table as FlatBuffers lay it out; Arrow checks the rest."""
    table = _PREFIX_BYTES + struct.unpack_from("<I", head, _PREFIX_BYTES)[0]
    fields = table - struct.unpack_from("<i", head, table)[0]
    if fields < 0 or struct.unpack_from("<H", head, fields)[0] <= _BODY_LENGTH:
        return 0
    place = struct.unpack_from("<H", head, fields + _BODY_LENGTH)[0]
    return int(struct.unpack_from("<q", head, table + place)[0]) if place else 0


_RULE = "frostline arrow 9"
# Files indexed at once: each waits for its store most of the time.
_THREADS = 16
# Results of ``map`` that ``datasets`` keeps beside the data: the same samples again, or other ones.
_LEFT_BEHIND = ("cache-", "tmp", "indices")
_SPLIT_FOLDERS = "dataset_dict.json"
# What ``save_to_disk`` writes beside the files, which say all of it themselves.
_BESIDE = ("dataset_info.json", "state.json")


class ArrowFiles:
    """Streams of record batches with images as ``struct{bytes, path}`` or plain binary, and labels, as in Parquet.

    Images lie in such files as they are encoded, so that each is read as a range of its file. Of a file only the
    headers of its batches and the columns beside the images are read to find them. Images and masks of which rows say
    paths alone are found as those of Parquet files are. A folder with a
    ``dataset_dict.json`` has a folder for each split; elsewhere the names of files and folders may say splits
    (``formats.split_names``).
    """

    name = "arrow"
    is_incremental = True

    def claims(self, entries: Sequence[Entry]) -> bool:
        """See ``Format.claims``: one Arrow file is enough."""
        return any(_is_arrow(entry.object) for entry in entries)

    def digest(self, entries: Sequence[Entry]) -> str:
        """See ``Format.digest``."""
        # Rows may say paths of images.
        wanted = (
            entry
            for entry in entries
            if _is_arrow(entry.object) or _says_splits(entry.object) or is_sample(entry.object)
        )
        return digest_of(_RULE, wanted)

    def read(self, store: ObjectStore, entries: Sequence[Entry], before: ListedSamples | None = None) -> ListedSamples:
        """See ``Format.read``; of a file that did not change only the beginning is read again.

        Where images have masks, their heads are read too: a mask must be as large as its image.
        """
        found = sorted(entry for entry in entries if _is_arrow(entry.object))
        if not found:
            raise EmptyDataset(f"{store.url} holds no Arrow files (such as data-00000-of-00001.arrow)")
        known = known_files(before if before and before.reading == OBJECTS else None, _is_arrow)
        with ThreadPoolExecutor(_THREADS, "frostline-index") as threads, ThreadPoolExecutor(_THREADS) as heads:
            files = list(threads.map(partial(_read, store, known, heads), found))
        files, are_elsewhere = locate_rows(files, found, store, entries, lambda entry: entry.object, before)
        names = [entry.object for entry in found]
        tables = with_partitions([file.table for file in files], names)
        said = splits_of_folders(names, (entry.object for entry in entries))
        table, is_divided = with_splits(join_tables(tables), names, list(map(len, tables)), said)
        if not len(table):
            raise EmptyDataset(
                f"not one row of the {len(files)} Arrow files at {store.url} holds an image, or says the path of one "
                "that is here"
            )
        known_names = {file.classes for file in files if file.classes}
        labels = encode_labels(table[SAID], known_names.pop() if len(known_names) == 1 else ())
        listed = ListedSamples(
            table=finish_table(table, labels),
            classes=labels.classes,
            digest=self.digest(entries),
            reading=URLS if are_elsewhere else OBJECTS,
            divided_by_names=is_divided,
            has_named_classes=labels.are_names,
            used=(*names, *_about(names, entries)),
            left_out=(
                *(left for file in files for left in file.left_out),
                *contradictions_of_partitions(tables, names),
            ),
            is_turned=any(file.is_turned for file in files),
            named=names_of_columns([file.table for file in files], [file.named for file in files]),
        )
        return with_known_files(listed, files, _is_arrow, str)


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


def _about(files: Sequence[str], entries: Sequence[Entry]) -> Iterator[str]:
    """The names of objects that tell of files, or of their folders."""
    folders = {name.rpartition("/")[0] for name in files}
    for entry in entries:
        folder, _, base = entry.object.rpartition("/")
        if _says_splits(entry.object) or (base in _BESIDE and folder in folders):
            yield entry.object


def _says_splits(name: str) -> bool:
    return name.rpartition("/")[2] == _SPLIT_FOLDERS and not is_hidden(name)


def _is_arrow(name: str) -> bool:
    base = name.rpartition("/")[2].lower()
    return base.endswith(ARROW_SUFFIXES) and not base.startswith(_LEFT_BEHIND) and not is_hidden(name)


_Known = Mapping[tuple[str, str], tuple[pa.Table, tuple[LeftOut, ...]]]


def _read(store: Versioned, known: _Known, heads: ThreadPoolExecutor, entry: Entry) -> TableFile:
    stream = ArrowStream(ObjectRanges(store, entry), entry.object, entry.size)
    columns = roles_in(entry.object, stream.schema)
    _check_in_place(entry.object, stream.schema, columns)
    if entry.etag and (entry.object, entry.etag) in known:
        table, left = known[entry.object, entry.etag]
        return TableFile(table, columns.classes, left, columns.is_turned, columns.named)
    tables, row = [_schema_of(stream.schema, columns, entry)], 0
    for batch in stream.batches():
        if not row and may_name_classes(columns):
            columns = with_names_for_masks(columns, _first(store, entry, batch, columns))
            tables = [_schema_of(stream.schema, columns, entry)]
        tables.append(_table(store, heads, entry, columns, batch, row))
        row += len(batch)
    # A list that is long in one batch is left out of all.
    long = [path for path in columns.lists if any(column_name(path) not in some.schema.names for some in tables)]
    table = pa.concat_tables(tables, promote_options="permissive")
    table = table.drop_columns([name for path in long if (name := column_name(path)) in table.schema.names])
    left = omissions_of_table(entry.object, columns.left, long)
    return TableFile(table, columns.classes, left, columns.is_turned, columns.named)


def _check_in_place(name: str, schema: pa.Schema, columns: ColumnRoles) -> None:
    """Make sure that each image and each mask lies in one piece."""
    kinds = dict(column_paths(schema))
    view = next((path for path in (columns.image, columns.mask) if path and pa.types.is_binary_view(kinds[path])), None)
    if view is not None:
        raise DataError(
            f"{name} has views in its column {view!r}, which are not read in place: write it again with plain binary "
            "values, or as Parquet"
        )


def _first(store: Versioned, entry: Entry, batch: StreamedBatch, columns: ColumnRoles) -> list[bytes]:
    """The first values of the column that may be one of masks."""
    assert columns.mask is not None
    cells = batch.cells(columns.mask)
    places = zip(cells.offsets[cells.valid].tolist(), cells.lengths[cells.valid].tolist(), strict=True)
    return [bytes(store.read(entry.object, offset, length)) for offset, length in islice(places, LOOKED_AT) if length]


def _schema_of(schema: pa.Schema, columns: ColumnRoles, entry: Entry) -> pa.Table:
    """The table of a file without batches."""
    beside = pa.table({name: pa.chunked_array([], schema.field(name).type) for name in _beside(columns, schema.names)})
    none = np.empty(0, np.int64)
    places = CellPositions(offsets=none, lengths=none, valid=none.astype(bool))
    return _columns(entry, columns, places, beside, 0)


def _beside(columns: ColumnRoles, names: Collection[str]) -> tuple[str, ...]:
    names, paths = frozenset(names), (*columns.about, columns.label, columns.other, *columns.lists)
    # A name of a column may have a dot in it, as the path of a struct's field has.
    named = (column_of(names, path) for path in paths if path is not None)
    images = {column_of(names, path) for path in (columns.image, columns.mask) if path is not None}
    return tuple(dict.fromkeys(name for name in named if name is not None and name not in images))


def _table(
    store: Versioned, heads: ThreadPoolExecutor, entry: Entry, columns: ColumnRoles, batch: StreamedBatch, row: int
) -> pa.Table:
    # In the order in which they lie there, so that reading goes on and does not go back.
    places = batch.cells(columns.image)
    beside = pa.table({name: batch.column(name) for name in _beside(columns, batch.names)})
    check_written_out(entry.object, beside)
    table = _columns(entry, columns, places, beside, row)
    paths = batch.paths(columns.image, ~places.valid)
    if paths is not None:
        table = table.append_column(IMAGE_PATH, paths)
    if columns.mask is not None:
        look = partial(size_at, store, entry.object, is_turned=columns.is_turned)
        for name, column in _targets(look, heads, entry, columns.mask, places, batch).items():
            table = table.append_column(name, column)
    return table


def _columns(entry: Entry, columns: ColumnRoles, places: CellPositions, beside: pa.Table, row: int) -> pa.Table:
    rows = len(places.offsets)
    said = label_texts(entry.object, columns, beside) if beside.num_columns else pa.nulls(rows, pa.string())
    lists = short_lists(beside, columns.lists)
    return pa.table(
        {
            "name": pa.array([f"{entry.object}/{number}" for number in range(row, row + rows)], pa.string()),
            "object": pa.array([entry.object] * rows, pa.string()),
            "offset": pa.array(places.offsets),
            "length": pa.array(places.lengths, mask=~places.valid),
            "etag": pa.array([entry.etag] * rows, pa.string()),
            SAID: said,
            **{column_name(name): plain_column(column_at(beside, name)) for name in columns.about},
            **{column_name(name): column for name, column in lists.items()},
        }
    )


def _targets(
    look: Callable[[int, int], tuple[int, int]],
    heads: ThreadPoolExecutor,
    entry: Entry,
    mask: str,
    images: CellPositions,
    batch: StreamedBatch,
) -> dict[str, pa.Array]:
    masks = batch.cells(mask)
    there = masks.valid & (masks.lengths > 0)
    found = [
        Mask(entry.object, offset, length, entry.etag) if is_there else NO_MASK
        for offset, length, is_there in zip(masks.offsets.tolist(), masks.lengths.tolist(), there, strict=True)
    ]
    paths = batch.paths(mask, ~there)
    is_said = there if paths is None else there | np.asarray(paths.is_valid())

    def size(row: int) -> tuple[int, int]:
        if not is_said[row] or not images.valid[row]:
            return 0, 0
        return look(int(images.offsets[row]), int(images.lengths[row]))

    columns = target_columns(found, list(heads.map(size, range(len(found)))))
    return columns | ({} if paths is None else {MASK_PATH: paths})
