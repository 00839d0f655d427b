"""Parquet files with a column of images or texts, as Hugging Face keeps data sets: cells are read in place."""

import bisect
import hashlib
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import accumulate, islice
from typing import IO, Any, NamedTuple, Protocol
from urllib.parse import quote, unquote

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from cachetools import LRUCache, TTLCache

from frostline.core import CELLS, URLS
from frostline.core.errors import BadRequest, DataError, EmptyDataset, ObjectNotFound, SampleError
from frostline.datasets.formats.base import (
    ListedSamples,
    column_at,
    digest_of,
)
from frostline.datasets.formats.contradictions import contradictions_of_partitions
from frostline.datasets.formats.folders import NO_MASK, Mask, is_sample, table_log, target_columns
from frostline.datasets.formats.joining import with_partitions
from frostline.datasets.formats.labels import column_name, encode_labels, join_tables, with_splits
from frostline.datasets.formats.left_out import LeftOut
from frostline.datasets.formats.ranges import (
    HEADER_BYTES,
    LARGEST_FOOTER,
    NUMBER_BYTES,
    CheckedPages,
    ColumnChunks,
    RangeFile,
    arrays_of,
    in_words,
    is_parquet,
    keeps_dictionaries,
    list_columns,
    open_parquet,
    parquet_file,
    read_columns,
    reading_dictionaries,
)
from frostline.datasets.formats.tables import (
    LOOKED_AT,
    SAID,
    ColumnRoles,
    TableFile,
    finish_table,
    label_texts,
    may_name_classes,
    names_of_columns,
    number_lists,
    omissions_of_table,
    path_leaf,
    plain_column,
    roles_of_parts,
    with_names_for_masks,
)
from frostline.datasets.formats.urls import IMAGE_PATH, MASK_PATH, known_files, locate_rows, with_known_files
from frostline.preprocess.images import size_of
from frostline.preprocess.steps import MAX_INPUTS, frame_parts, record_bytes
from frostline.stores.protocols import Buffer, Entry, ObjectStore, Versioned, is_other_version, plain_etag

__all__ = (
    "CELLS_BYTES",
    "Cell",
    "CellCache",
    "CellDecoder",
    "CellFile",
    "CellPlan",
    "CellReader",
    "Cells",
    "Holding",
    "Parquet",
    "cells_bytes",
    "group_cells",
    "place_of_leaf",
)


# Of pages whose values begin as those before do, at once; and rows, where a page is small.
_WRITTEN_OUT_BYTES, _WRITTEN_OUT_ROWS = 16 << 20, 1024
# Where a row's bytes lie (part, start, length), and what Arrow has for it.
_ROW_BYTES = 32
# Where values begin as those before them do, they may have so many times the bytes of their pages.
_PREFIXES_GROWTH = 2
# Of a number of 96 bits.
_LONGEST_NUMBER = 12


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cells:
    """The cells of a column of a row group. A value that many rows have is there once.

    Attributes:
        parts: memory in which they lie.
        part: number of the part of each row's cell, ``int64[rows]``.
        starts: places at which cells begin in their part, ``int64[rows]``.
        lengths: bytes of each cell, ``int64[rows]``; -1 where there is none.
    """

    parts: tuple[memoryview, ...]
    part: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def nbytes(self) -> int:
        """The memory of all of it."""
        return sum(part.nbytes for part in self.parts) + self.part.nbytes + self.starts.nbytes + self.lengths.nbytes

    def view(self, row: int) -> memoryview | None:
        """A view of a row's cell; None where there is none."""
        start, length = int(self.starts[row]), int(self.lengths[row])
        return None if length < 0 else self.parts[int(self.part[row])][start : start + length]

    @classmethod
    def of(cls, chunks: Sequence[pa.Array]) -> "Cells":
        """The cells of chunks of binary values, or of dictionaries of them, without a copy."""
        found = [_places(chunk) for chunk in chunks]
        numbers = [np.full(len(starts), part, np.int64) for part, (_, starts, _) in enumerate(found)]
        none = np.zeros(0, np.int64)
        return cls(
            parts=tuple(data for data, _, _ in found),
            part=np.concatenate([none, *numbers]),
            starts=np.concatenate([none, *(starts for _, starts, _ in found)]),
            lengths=np.concatenate([none, *(lengths for _, _, lengths in found)]),
        )


def _places(chunk: pa.Array) -> tuple[memoryview, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The memory of a chunk's values, and start and length of each row."""
    if pa.types.is_dictionary(chunk.type):
        data, starts, lengths = _places(chunk.dictionary)
        valid = np.asarray(chunk.is_valid())
        rows = np.asarray(chunk.indices.fill_null(0)).astype(np.int64)
        if len(rows) and not 0 <= rows.min() <= rows.max() < max(1, len(starts)):
            raise DataError("a column names a value that its dictionary has not: the file is damaged")
        rows = np.where(valid, rows, len(starts))  # behind the last one stands none
        return data, np.append(starts, 0)[rows], np.append(lengths, -1)[rows]
    values = chunk.cast(pa.large_binary())
    _, places, data = values.buffers()
    count = len(values)
    ends = np.frombuffer(places, np.int64, count + 1, 8 * values.offset) if count else np.zeros(1, np.int64)
    lengths = np.where(np.asarray(values.is_valid()), np.diff(ends), -1)
    return memoryview(data or b""), ends[:-1], lengths


def group_cells(
    source: IO[bytes] | RangeFile,
    metadata: pq.FileMetaData,
    group: int,
    path: str,
    chunks: ColumnChunks | None = None,
) -> Cells:
    """The cells of a column of a row group, in hardly more memory than its pages have bytes.

    Pages with dictionaries are read as such, so that a value that many rows have is there once. Pages in which a value
    begins as the one before does are written out a few rows at a time, as far as ``cells_bytes`` goes.

    Args:
        source: the file, of which ranges are read in this thread.
        metadata: metadata of its footer.
        group: number of the row group.
        path: path of the column, that of a leaf or of a list of numbers.
        chunks: the footer's columns, where they are asked for more than once.

    Raises:
        DataError: The column is damaged, or has more bytes than the footer says.
        ObjectNotFound: there is no such column.
    """
    place = place_of_leaf(metadata, path)
    if not metadata.row_group(group).num_rows:
        return Cells.of([])
    about = (chunks or ColumnChunks(metadata)).of(group, place)
    most = _cells_bytes(metadata, group, place, about)
    source = CheckedPages(source, about, most)
    is_dictionary = keeps_dictionaries(about)
    if is_dictionary or about.physical_type != "BYTE_ARRAY":
        file = reading_dictionaries(source, metadata, [place] if is_dictionary else [])
        return Cells.of(_leaves(file.read_row_group(group, columns=[path], use_threads=False).column(0)))
    file = pq.ParquetFile(pa.PythonFile(source, mode="r"), metadata=metadata, pre_buffer=False)
    found = list[pa.Array]()
    rows = max(1, min(_WRITTEN_OUT_ROWS, _WRITTEN_OUT_BYTES // max(1, about.total_uncompressed_size)))
    for batch in file.iter_batches(rows, row_groups=[group], columns=[path], use_threads=False):
        found += _leaves(pa.chunked_array([batch.column(0)]))
        if sum(chunk.nbytes for chunk in found) > most:
            raise DataError(f"a row group has more than {most} bytes of {path}: write it in another encoding")
    return Cells.of(found)


def _leaves(column: pa.ChunkedArray) -> list[pa.Array]:
    """The only leaf of a column, however deep it lies in structs; lists of numbers as arrays of NumPy."""
    if number_lists(column.type) is not None:
        return list(arrays_of(column).chunks)
    chunks = list(column.chunks)
    while chunks and pa.types.is_struct(chunks[0].type):
        chunks = [chunk.flatten()[0] for chunk in chunks]
    return chunks


CELLS_BYTES = 256 << 20
"""Default memory for decoded columns, in bytes."""
# What decoding a chunk takes at its peak beside itself: its compressed bytes, and a page more than once.
_WHILE_DECODED = 3
# Files of which footers are kept, whose bytes are together those of the largest.
_MAX_FILES = 256
# Seconds for which a column that could not be decoded is not tried again for each of its rows, and how many such.
_FAILED_S, _MAX_FAILED = 60.0, 256
_BESIDE = "+"  # stands between columns, in whose quoted names there is none


class Cell(NamedTuple):
    """Where samples lie: columns of a file of which size and version are known, so that its end need not be sought.

    Attributes:
        file: name of the object.
        columns: paths of the leaf columns: one, or one for each part of a sample; none where the sample is the whole
            object, an image whose path a row says.
        size: size of the file in bytes.
        version: digest of the file's etag.
    """

    file: str
    columns: tuple[str, ...]
    size: int
    version: str

    @classmethod
    def of(cls, entry: Entry, *columns: str) -> "Cell":
        """The place of a column, or of several, in a file as it was listed."""
        return cls(entry.object, columns, entry.size, _version(entry.etag))

    @classmethod
    def parse(cls, object: str) -> "Cell":
        """The inverse of ``str``.

        Raises:
            BadRequest: the name is not that of a cell.
        """
        file, mark, rest = object.rpartition("#")
        column, _, place = rest.partition("@")
        size, _, version = place.partition(".")
        if not mark or not size.isascii() or not size.isdigit() or len(size) > 18:
            raise BadRequest(f"samples.objects: {object[:200]!a} is no column of a Parquet file")
        columns = column.split(_BESIDE) if column else []
        if len(columns) > MAX_INPUTS:
            raise BadRequest(f"samples.objects: {object[:200]!a} names more than {MAX_INPUTS} columns")
        return cls(file, tuple(map(unquote, columns)), int(size), version)

    def each_column(self) -> "Iterator[Cell]":
        """The place of each column by itself."""
        return (self._replace(columns=(column,)) for column in self.columns)

    def __str__(self) -> str:
        columns = _BESIDE.join(quote(column, safe="") for column in self.columns)
        return f"{self.file}#{columns}@{self.size}.{self.version}"


def _is_in_file(object: str) -> bool:
    """Whether a sample of that object lies in a Parquet file, and is not the whole of another object."""
    return bool(Cell.parse(object).columns)


def _cells_of(object: str) -> str:
    """Name of the file in which a sample of that object lies."""
    return object.rpartition("#")[0]


class CellCache:
    """Decoded columns of row groups, the latest used, within a bound. Safe for threads; one decodes it for all.

    Args:
        max_bytes: maximum size of the cells, including the memory for decoding.
        tenants: function that returns the number of tenants that share it. Half of it is divided among them, so that
            each has a part to decode in, whatever the stores of several others keep waiting.
    """

    def __init__(self, max_bytes: int = CELLS_BYTES, tenants: Callable[[], int] = lambda: 1) -> None:
        self._maximum = max_bytes
        self._tenants = tenants
        self._used = 0
        self._taken: Counter[str] = Counter()
        self._changed = threading.Condition()
        self._kept: OrderedDict[tuple[object, ...], tuple[Cells, int]] = OrderedDict()
        self._under_way: set[tuple[object, ...]] = set()

    @property
    def used_bytes(self) -> int:
        """What is kept, and what those that are being decoded take."""
        return self._used

    def get(self, key: tuple[object, ...], plan: Callable[[], "CellPlan"]) -> Cells:
        """A column, decoded now or before.

        Args:
            key: key of the cells, which begins with the name of the tenant.
            plan: function that says how they are decoded, called where they are to be; it, and what it gives, are
                called outside of any lock.

        Raises:
            SampleError: the column does not fit the budget.
        """
        with self._changed:
            self._changed.wait_for(lambda: key not in self._under_way)
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key][0]
            self._under_way.add(key)
        try:
            planned = plan()
            if planned.takes > self._maximum:
                most = self._maximum * planned.nbytes // planned.takes
                raise SampleError(
                    f"a row group with {planned.nbytes} bytes of images is too large: {most} fit; write smaller row "
                    "groups, or start the node with more --memory"
                )
            return self._decoded(key, planned.takes, planned.decode)
        finally:
            with self._changed:
                self._under_way.discard(key)
                self._changed.notify_all()

    @contextmanager
    def holding(self, tenant: str, nbytes: int) -> Iterator[None]:
        """Make room, while the context lasts, for something else of a tenant that takes memory.

        Raises:
            SampleError: The memory does not fit the budget.
        """
        if nbytes > self._maximum:
            raise SampleError(
                f"a footer that takes {nbytes} bytes while it is read is too large: {self._maximum} fit; write fewer "
                "row groups to a file, or start the node with more --memory"
            )
        self._take(tenant, nbytes)
        try:
            yield
        finally:
            self._give_back(tenant, nbytes)

    def _decoded(self, key: tuple[object, ...], takes: int, decode: "Callable[[], tuple[Cells, str]]") -> Cells:
        tenant, stays = str(key[0]), 0
        self._take(tenant, takes)
        try:
            column, _ = decode()
            stays = min(column.nbytes, takes)
            return column
        finally:
            with self._changed:
                if stays:
                    self._kept[key] = (column, stays)
                self._give_back(tenant, takes, stays)

    def _take(self, tenant: str, nbytes: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._may_take(tenant, nbytes))
            while self._used + nbytes > self._maximum:
                _, (_, freed) = self._kept.popitem(last=False)
                self._used -= freed
            self._used += nbytes
            self._taken[tenant] += nbytes

    def _give_back(self, tenant: str, nbytes: int, stays: int = 0) -> None:
        with self._changed:
            self._used += stays - nbytes
            self._taken[tenant] -= nbytes
            self._changed.notify_all()

    def _may_take(self, tenant: str, nbytes: int) -> bool:
        """Whether it fits beside what is taken and what is kept for others; all that was decoded before may go."""
        others = self._tenants() - 1 if tenant else 0
        part = self._maximum // (2 * others + 2) if others else 0
        if self._taken[tenant] + nbytes <= part or nbytes > self._maximum - others * part:
            others = 0  # it is its own part; or more than all that is kept for nobody
        used = sum(min(taken, part) for name, taken in self._taken.items() if name != tenant) if others else 0
        return self._taken.total() + nbytes + others * part - used <= self._maximum


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CellFile:
    """A file whose end was read.

    Attributes:
        footer: footer, as whoever read it keeps it.
        ends: numbers of rows up to and with each row group.
        etag: etag of the file.
        nbytes: bytes of the footer as it lies there, of which so many are kept; fewer where it takes less memory.
    """

    footer: Any
    ends: list[int]
    etag: str
    nbytes: int

    def kept_bytes(self) -> int:
        """Bytes of which so many are kept; at least those of a small footer."""
        return max(self.nbytes, LARGEST_FOOTER // _MAX_FILES)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CellPlan:
    """How a column of a row group will be decoded.

    Attributes:
        nbytes: the most bytes that its cells may have.
        takes: memory that decoding takes at its peak.
        decode: function that decodes it, and gives the file's etag too.
    """

    nbytes: int
    takes: int
    decode: Callable[[], tuple[Cells, str]]


Holding = Callable[[int], AbstractContextManager[None]]
"""Takes memory, of as many bytes, while it is entered."""


class CellDecoder(Protocol):
    """Decodes columns of Parquet files, in this process or in others. Safe for threads.

    Attributes:
        tenant: name of the tenant for which it does; what it decodes is kept for it alone.
    """

    tenant: str

    def open(self, source: RangeFile, holding: Holding) -> CellFile:
        """Read the end of a file; ``holding`` takes the memory that its footer takes meanwhile.

        Raises:
            DataError: the file is damaged.
        """

    def plan(
        self, source: Callable[[], RangeFile], file: CellFile, group: int, column: str, holding: Holding
    ) -> CellPlan:
        """Say how a column of a row group will be decoded; ``column`` is its path, and ``source`` opens the file.

        Raises:
            DataError: the file is damaged.
            ObjectNotFound: there is no such column.
        """


class CellsHere:
    """Decodes columns in this process."""

    tenant = ""

    def open(self, source: RangeFile, holding: Holding) -> CellFile:  # noqa: ARG002
        """See ``CellDecoder``."""
        metadata = parquet_file(source).metadata
        ends = list(accumulate(metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)))
        return CellFile(footer=metadata, ends=ends, etag=source.version, nbytes=int(metadata.serialized_size))

    def plan(
        self,
        source: Callable[[], RangeFile],
        file: CellFile,
        group: int,
        column: str,
        holding: Holding,  # noqa: ARG002
    ) -> CellPlan:
        """See ``CellDecoder``."""

        def decode() -> tuple[Cells, str]:
            opened = source()
            return group_cells(opened, file.footer, group, column), opened.version

        nbytes = cells_bytes(file.footer, group, place_of_leaf(file.footer, column))
        return CellPlan(nbytes=nbytes, takes=_WHILE_DECODED * nbytes, decode=decode)


class CellReader:
    """A ``Versioned`` whose objects are columns of Parquet files and whose offsets are rows. Safe for threads.

    Where an object is several columns, what is read is a record of their cells (``preprocess.steps``).

    Args:
        store: store that holds the files.
        cache: cells that are kept decoded; several readers may share it.
        url: URL of the store.
        decoder: decoder of columns; by default this process.
    """

    def __init__(self, store: Versioned, cache: CellCache, url: str = "", decoder: CellDecoder | None = None) -> None:
        self._decoder = CellsHere() if decoder is None else decoder
        self._store = store
        self._cache = cache
        self._holding = partial(cache.holding, self._decoder.tenant)
        self._url = url
        self._lock = threading.Lock()
        self._failed: TTLCache[tuple[object, ...], str] = TTLCache(_MAX_FAILED, _FAILED_S)
        self._files: LRUCache[tuple[str, int, str], CellFile] = LRUCache(LARGEST_FOOTER, CellFile.kept_bytes)

    def read(self, object: str, offset: int, length: int) -> Buffer:
        """See ``Readable.read``: the bytes of a cell, which are copied."""
        return self.read_version(object, offset, length)[0]

    def read_version(self, object: str, offset: int, length: int) -> tuple[Buffer, str]:
        """See ``Versioned.read_version``.

        Raises:
            ObjectNotFound: there is no such cell of that length, or its file has changed since it was listed.
            SampleError: The sample's row group is too large.
        """
        cell = Cell.parse(object)
        if not cell.columns:
            return self._whole(cell, offset, length)
        with _said(cell.file):
            file = self._file(cell)
            group = bisect.bisect_right(file.ends, offset)
            if group == len(file.ends):
                raise ObjectNotFound(f"{cell.file} has no row {offset}: it has changed")
            row = offset - (file.ends[group - 1] if group else 0)
            values = [self._column(each, file, group).view(row) for each in cell.each_column()]
        there = [bytes(value) for value in values if value is not None]
        data = _record(there) if len(there) == len(values) else None
        if data is None or len(data) != length:
            raise ObjectNotFound(f"row {offset} of {cell.file} has no sample of {length} bytes: it has changed")
        return data, file.etag

    def _whole(self, cell: Cell, offset: int, length: int) -> tuple[Buffer, str]:
        data, etag = self._store.read_version(cell.file, offset, length)
        self._check(cell, etag)
        return data, etag

    def _column(self, cell: Cell, file: CellFile, group: int) -> Cells:
        source = partial(RangeFile, self._store, cell.file, cell.size)

        def plan() -> CellPlan:
            planned = self._decoder.plan(source, file, group, cell.columns[0], self._holding)
            return replace(planned, decode=partial(self._decoded, cell, planned.decode))

        key = (self._decoder.tenant, self._url, cell, group)
        with self._lock:
            said = self._failed.get(key)
        if said is not None:
            raise SampleError(said)
        try:
            return self._cache.get(key, plan)
        except SampleError as error:
            with self._lock:
                self._failed[key] = str(error)
            raise

    def _decoded(self, cell: Cell, decode: Callable[[], tuple[Cells, str]]) -> tuple[Cells, str]:
        cells, etag = decode()
        self._check(cell, etag)
        return cells, etag

    def _file(self, cell: Cell) -> CellFile:
        key = (cell.file, cell.size, cell.version)
        with self._lock:
            if (known := self._files.get(key)) is not None:
                return known
        file = self._decoder.open(RangeFile(self._store, cell.file, cell.size), self._holding)
        self._check(cell, file.etag)
        with self._lock:
            self._files[key] = file
        return file

    def _check(self, cell: Cell, etag: str) -> None:
        if _version(etag) != cell.version:
            raise ObjectNotFound(f"{cell.file} has changed since it was listed")


@contextmanager
def _said(file: str) -> Iterator[None]:
    # What is wrong with a file as a whole was said when it was listed: now it is another one.
    try:
        with in_words(file):
            yield
    except DataError as error:
        raise ObjectNotFound(f"{error}; it may have changed since it was listed") from error


def place_of_leaf(metadata: pq.FileMetaData, column: str) -> int:
    """The number of a column that a path names.

    Raises:
        ObjectNotFound: there is no such column.
    """
    # The leaf of a list has more names behind that of its column, which writers choose.
    paths = [f"{metadata.schema.column(place).path}." for place in range(metadata.num_columns)]
    found = [place for place, path in enumerate(paths) if path.startswith(f"{column}.")]
    if len(found) != 1:
        raise ObjectNotFound(f"there is no column {column[:100]!r} in the file: it has changed")
    return found[0]


def cells_bytes(metadata: pq.FileMetaData, group: int, place: int) -> int:
    """The most bytes of the cells of a column of a row group, by what the file's footer says."""
    return _cells_bytes(metadata, group, place, ColumnChunks(metadata).of(group, place))


def _cells_bytes(metadata: pq.FileMetaData, group: int, place: int, about: pq.ColumnChunkMetaData) -> int:
    rows = metadata.row_group(group).num_rows
    values, pages = max(rows, about.num_values), max(about.total_uncompressed_size, about.total_compressed_size)
    if about.physical_type in NUMBER_BYTES:
        return int(max(pages, values * NUMBER_BYTES[about.physical_type]) + rows * HEADER_BYTES)
    column = metadata.schema.column(place)
    if about.physical_type != "BYTE_ARRAY":
        return int(max(pages, values * max(column.length, _LONGEST_NUMBER)) + values * _ROW_BYTES)
    growth = _PREFIXES_GROWTH if "DELTA_BYTE_ARRAY" in about.encodings else 1
    return int(growth * pages + values * _ROW_BYTES)


def _record(parts: list[bytes]) -> bytes:
    return parts[0] if len(parts) == 1 else frame_parts(parts)


def _version(etag: str) -> str:
    return hashlib.blake2b(plain_etag(etag).encode(), digest_size=6).hexdigest() if etag else ""


_RULE = "frostline parquet 11"
# Files read at once: each holds a row group of images while their sizes are looked at.
_THREADS = 4


class Parquet:
    """Files with images as ``struct{bytes, path}`` or plain binary, or a column of texts, and a label beside them.

    What the schema's ``huggingface`` metadata says of columns and classes holds. Parquet tells the size of no cell but
    with its page, so the first listing reads the column of images once, a row group at a time; of a file that did not
    change only the end is read again. Where no file holds images, but structs with a ``path`` and no ``bytes``, images
    are read from there, as those of lists of URLs; where some rows hold images and others paths, from beside the files.
    So are masks.
    Scalar columns become metadata. A second column of images, called ``mask``, ``segmentation``, ``annotation`` or
    ``label``, is that of the masks. Files whose names or folders say ``train``, ``val``, ``test`` or the like are
    splits (``formats.split_names``), and folders such as ``site=north`` are columns.

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
        """See ``Format.claims``: one Parquet file is enough, where no log says which files of a table count."""
        return any(map(is_parquet, entries)) and not table_log(entries)

    def digest(self, entries: Sequence[Entry]) -> str:
        """See ``Format.digest``."""
        rule = _RULE if self._column is None else f"{_RULE} {self._column}"
        # Rows may say paths of images.
        return digest_of(rule, (entry for entry in entries if is_parquet(entry) or is_sample(entry.object)))

    def read(self, store: ObjectStore, entries: Sequence[Entry], before: ListedSamples | None = None) -> ListedSamples:
        """See ``Format.read``."""
        found = sorted(filter(is_parquet, entries))
        if not found:
            raise EmptyDataset(f"{store.url} holds no Parquet files (such as train.parquet)")
        known = known_files(before if before and before.reading == CELLS else None, _is_in_file, _cells_of)
        with ThreadPoolExecutor(_THREADS, "frostline-index") as threads:
            files = list(threads.map(partial(_read, store, known, self._column), found))
        files, are_elsewhere = locate_rows(files, found, store, entries, lambda entry: str(Cell.of(entry)), before)
        names = [entry.object for entry in found]
        tables = with_partitions([file.table for file in files], names)
        table, is_divided = with_splits(join_tables(tables), names, list(map(len, tables)))
        if not len(table):
            raise EmptyDataset(f"not one row of the {len(files)} Parquet files at {store.url} holds a sample")
        classes = {file.classes for file in files if file.classes}
        said = encode_labels(table[SAID], classes.pop() if len(classes) == 1 else ())
        listed = ListedSamples(
            table=finish_table(table, said),
            classes=said.classes,
            digest=self.digest(entries),
            reading=URLS if are_elsewhere else CELLS,
            divided_by_names=is_divided,
            has_named_classes=said.are_names,
            used=tuple(entry.object for entry in found),
            left_out=(
                *(left for file in files for left in file.left_out),
                *contradictions_of_partitions(tables, names),
            ),
            is_turned=any(file.is_turned for file in files),
            named=names_of_columns([file.table for file in files], [file.named for file in files]),
        )
        return with_known_files(listed, files, _is_in_file, _cells_of)


_Known = Mapping[tuple[str, str], tuple[pa.Table, tuple[LeftOut, ...]]]


def _read(store: Versioned, known: _Known, column: str | None, entry: Entry) -> TableFile:
    with open_parquet(store, entry.object, entry.size) as (parquet, source):
        columns, paths = roles_of_parts(entry.object, parquet.schema_arrow, column)
        if entry.etag and (entry.object, entry.etag) in known:
            table, left = known[entry.object, entry.etag]
            return TableFile(table, columns.classes, left, columns.is_turned, columns.named)
        if may_name_classes(columns) and columns.mask is not None:
            first = next(_groups(source, parquet.metadata, columns.mask), Cells.of([]))
            views = (first.view(row) for row in range(len(first)))
            values = list(islice((bytes(view) for view in views if view is not None), LOOKED_AT))
            columns = with_names_for_masks(columns, values)
        table = _table(parquet, source, entry, columns, paths)
    if is_other_version(entry.etag, source.version):
        raise DataError(f"{entry.object} changed while it was read: ask again when nobody writes to it")
    long = [path for path in columns.lists if column_name(path) not in table.schema.names]
    left = omissions_of_table(entry.object, columns.left, long)
    return TableFile(table, columns.classes, left, columns.is_turned, columns.named)


def _table(
    parquet: pq.ParquetFile, source: RangeFile, entry: Entry, columns: ColumnRoles, paths: Sequence[str]
) -> pa.Table:
    lengths = _record_lengths(source, parquet.metadata, paths)
    wanted = [name for name in (*columns.about, columns.label, columns.other) if name is not None]
    beside = read_columns(source, parquet.metadata, entry.object, wanted) if wanted else None
    rows = len(lengths)
    said = pa.nulls(rows, pa.string()) if beside is None else label_texts(entry.object, columns, beside)
    lists = list_columns(source, parquet.metadata, entry.object, columns.lists)
    places = pa.array(range(rows), pa.int64())
    images = _paths_instead(parquet, source, paths[0], pc.is_null(lengths)) if len(paths) == 1 else None
    return pa.table(
        {
            "name": pa.array([f"{entry.object}/{row}" for row in range(rows)], pa.string()),
            "object": pa.array([str(Cell.of(entry, *paths))] * rows, pa.string()),
            "offset": places,
            "length": lengths,
            "etag": pa.array([entry.etag] * rows, pa.string()),
            SAID: said,
            **({column_name(name): plain_column(column_at(beside, name)) for name in columns.about} if beside else {}),
            **{column_name(name): column for name, column in lists.items()},
            **({} if images is None else {IMAGE_PATH: images}),
            **(_targets(parquet, source, entry, columns) if columns.mask else {}),
        }
    )


def _paths_instead(
    parquet: pq.ParquetFile, source: RangeFile, leaf: str, is_empty: pa.ChunkedArray
) -> pa.ChunkedArray | None:
    """The paths that rows say in the place of a leaf's contents; None where no row says one."""
    path = path_leaf(parquet.schema_arrow, leaf)
    if path is None or not pc.any(is_empty).as_py():
        return None
    said = column_at(read_columns(source, parquet.metadata, "the file", [path]), path).cast(pa.string())
    is_said = pc.and_(is_empty, pc.not_equal(pc.fill_null(said, ""), ""))
    return pc.if_else(is_said, said, pa.scalar(None, pa.string())) if pc.any(is_said).as_py() else None


def _targets(
    parquet: pq.ParquetFile, source: RangeFile, entry: Entry, columns: ColumnRoles
) -> dict[str, pa.Array | pa.ChunkedArray]:
    assert columns.mask is not None
    metadata, cell = parquet.metadata, str(Cell.of(entry, columns.mask))
    found = pc.fill_null(_lengths(source, metadata, columns.mask), 0)
    paths = _paths_instead(parquet, source, columns.mask, pc.equal(found, 0))
    lengths, said = found.to_pylist(), [None] * len(found) if paths is None else paths.to_pylist()
    masks = [Mask(cell, row, length, entry.etag) if length else NO_MASK for row, length in enumerate(lengths)]
    images = (cells.view(row) for cells in _groups(source, metadata, columns.image) for row in range(len(cells)))
    sizes = [
        size_of(image, is_turned=columns.is_turned) if image is not None and (length or path) else (0, 0)
        for image, length, path in zip(images, lengths, said, strict=False)
    ]
    return target_columns(masks, sizes) | ({} if paths is None else {MASK_PATH: paths})


def _lengths(source: RangeFile, metadata: pq.FileMetaData, path: str) -> pa.ChunkedArray:
    """Bytes of each cell; null where there is none."""
    found = [cells.lengths for cells in _groups(source, metadata, path)]
    return pa.chunked_array([pa.array(lengths, mask=lengths < 0) for lengths in found], pa.int64())


def _record_lengths(source: RangeFile, metadata: pq.FileMetaData, paths: Sequence[str]) -> pa.ChunkedArray:
    """Bytes of each sample; null where one of its parts is missing."""
    lengths = [_lengths(source, metadata, path) for path in paths]
    return lengths[0] if len(lengths) == 1 else reduce(pc.add, lengths, pa.scalar(record_bytes(len(paths))))


def _groups(source: RangeFile, metadata: pq.FileMetaData, path: str) -> Iterator[Cells]:
    """A column, a row group at a time."""
    chunks = ColumnChunks(metadata)
    for group in range(metadata.num_row_groups):
        yield group_cells(source, metadata, group, path, chunks)
