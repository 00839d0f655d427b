"""Reads files of a store by ranges: Parquet files as Arrow reads them, and headers that mostly follow each other.

Lists of numbers become arrays, encoded as NumPy keeps them.
"""

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from io import BytesIO
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.lib import format as npy

from frostline.core.errors import DataError
from frostline.datasets.formats.base import (
    MAX_VALUES,
    VALUE_BYTES,
    column_at,
    column_of,
    holds_binary,
    in_json,
    is_text,
)
from frostline.datasets.formats.left_out import is_hidden
from frostline.stores.protocols import Entry, Versioned, is_other_version

__all__ = (
    "HEADER_BYTES",
    "LARGEST_FOOTER",
    "MAGICS",
    "NUMBER_BYTES",
    "CheckedPages",
    "ColumnChunks",
    "ObjectRanges",
    "RangeFile",
    "arrays_of",
    "check_written_out",
    "in_words",
    "is_parquet",
    "keeps_dictionaries",
    "list_columns",
    "open_parquet",
    "parquet_file",
    "read_columns",
    "reading_dictionaries",
    "short_lists",
    "with_dictionaries",
    "written_out_bytes",
)


def is_parquet(entry: Entry) -> bool:
    """Whether an object is a Parquet file by its name, and neither hidden nor in a folder that is its writer's own.

    Writers of tables keep what is unfinished, and logs, in folders such as ``_temporary``.
    """
    name = entry.object
    return name.lower().endswith(".parquet") and not is_hidden(name) and _WRITERS_OWN.search(name) is None


_WRITERS_OWN = re.compile(r"(?:^|/)_[^/=]*/")


# A footer takes some forty times its bytes once it is read; and an element of one of its lists up to a kilobyte, where
# three bytes say how many there are.
LARGEST_FOOTER, _LONGEST_FOOTER_LIST = 8 << 20, 1 << 16
_FOOTER_END = 8
MAGICS = (b"PAR1", b"PARE")
"""What Parquet files end with; the second one where their footer is encrypted."""


def _check_footer(name: str, end: bytes) -> None:
    if end.endswith(MAGICS) and int.from_bytes(end[:4], "little") > LARGEST_FOOTER:
        raise DataError(
            f"{name} has a footer of more than {LARGEST_FOOTER >> 20} MiB: write it with fewer row groups or columns"
        )


class RangeFile:
    """A file of a store, as Arrow reads one: whole ranges, one request each. For one thread.

    Attributes:
        version: the etag that came with what was read; empty before that.
        name: name of the object.
        size: size of the object in bytes.
    """

    closed = False

    def __init__(self, store: Versioned, name: str, size: int) -> None:
        self.version = ""
        self._store = store
        self.name = name
        self.size = size
        self._place = 0

    def tell(self) -> int:
        """Where reading goes on."""
        return self._place

    def seek(self, place: int, whence: int = 0) -> int:
        """Go on from a place."""
        self._place = place + (0, self._place, self.size)[whence]
        return self._place

    def read(self, size: int = -1) -> bytes:
        """The bytes from here on, as many as there are.

        Raises:
            DataError: the file was replaced since the first read.
        """
        left = max(0, self.size - self._place)
        length = left if size < 0 else min(size, left)
        if not length:
            return b""
        data, version = self._store.read_version(self.name, self._place, length)
        if is_other_version(self.version, version):
            raise DataError(f"{self.name} changed while it was read: ask again when nobody writes to it")
        self.version = version
        self._place += length
        if self._place == self.size:
            _check_footer(self.name, bytes(data[-_FOOTER_END:]))
        return bytes(data)

    def readable(self) -> bool:
        """Whether it can be read: it can."""
        return True

    def seekable(self) -> bool:
        """Whether it can be read at any place: it can."""
        return True

    def writable(self) -> bool:
        """Whether it can be written to: it cannot."""
        return False

    def flush(self) -> None:
        """There is nothing to write."""

    def close(self) -> None:
        """There is nothing to close."""


@contextmanager
def in_words(name: str) -> Iterator[None]:
    """Translate what Arrow says of a Parquet file; ``name`` is that of the object.

    Raises:
        DataError: the file is damaged, cut off or encrypted.
    """
    try:
        yield
    except MemoryError:  # Arrow's is one of its own errors too, and says nothing of the file
        raise
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        if "crypt" in str(error).lower():
            raise DataError(f"{name} is encrypted, and Frostline has no key: write it without encryption") from error
        raise DataError(f"{name} is no Parquet file, or is damaged or cut off: make it again") from error


@contextmanager
def open_parquet(store: Versioned, name: str, size: int) -> Iterator[tuple[pq.ParquetFile, RangeFile]]:
    """A Parquet file to read from, in this thread alone: Arrow's own threads would not survive a fork.

    Args:
        store: store that holds the file.
        name: name of the object.
        size: size of the object in bytes.

    Raises:
        DataError: the file is damaged, cut off or encrypted, and what the caller reads from it too.
        StoreError: the store failed.
    """
    source = RangeFile(store, name, size)
    with in_words(name):
        yield parquet_file(source), source


def parquet_file(source: RangeFile, metadata: pq.FileMetaData | None = None) -> pq.ParquetFile:
    """The same of a file of ranges, without the words."""
    file, limit = pa.PythonFile(source, mode="r"), _LONGEST_FOOTER_LIST
    return pq.ParquetFile(file, metadata=metadata, pre_buffer=False, thrift_container_size_limit=limit)


# Encodings of which a cell takes as many bytes as it has there.
_KNOWN = frozenset({"PLAIN", "PLAIN_DICTIONARY", "RLE_DICTIONARY", "RLE", "BIT_PACKED"})
# Of a dictionary that Arrow makes, whose places have 32 bits.
_LARGEST_DICTIONARY = 1 << 30


class _Unread(RangeFile):
    """A file of any size that has no bytes, and knows whether some were asked for."""

    def __init__(self) -> None:
        self._place, self.size, self.is_asked = 0, 1 << 62, False

    def read(self, size: int = -1) -> bytes:  # noqa: ARG002
        """Nothing: to raise here would have Arrow write a traceback for each column."""
        self.is_asked = True
        return b""


class ColumnChunks:
    """What a footer says of each column of each row group. For one thread; of many columns it takes long to make."""

    def __init__(self, metadata: pq.FileMetaData) -> None:
        self._metadata, self._source = metadata, _Unread()
        self._file = pq.ParquetFile(pa.PythonFile(self._source, mode="r"), metadata=metadata, pre_buffer=False)

    def of(self, group: int, place: int) -> pq.ColumnChunkMetaData:
        """What it says of one.

        Asked for what is encrypted or makes no sense, Arrow ends the process; asked to read such a column, it raises.
        So it is asked to read first, from where there is nothing.

        Raises:
            ArrowException, OSError: The column is encrypted or damaged; see ``in_words``.
        """
        path = self._metadata.schema.column(place).path
        self._source.is_asked = False
        try:
            for _ in self._file.iter_batches(1, row_groups=[group], columns=[path], use_threads=False):
                break
        except (pa.ArrowException, OSError):
            if not self._source.is_asked:
                raise
        if not self._source.is_asked:
            raise pa.ArrowInvalid(f"the column {path} has no pages")
        return self._metadata.row_group(group).column(place)


class CheckedPages(RangeFile):
    """A column of a row group, whose pages are as its footer says before Arrow decodes them.

    Arrow believes each page how many bytes and values it has, and takes memory for as many.

    Args:
        source: the file.
        about: description of the column in its footer.
        max_bytes: the maximum of bytes that the pages may have, once they are decompressed.
    """

    def __init__(self, source: IO[bytes] | RangeFile, about: pq.ColumnChunkMetaData, max_bytes: int) -> None:
        self._source = source
        self._path = about.path_in_schema
        self._values = int(about.num_values)
        self._may_share = "DELTA_BYTE_ARRAY" in about.encodings
        self._max_bytes = max_bytes

    def tell(self) -> int:
        """See ``RangeFile``."""
        return self._source.tell()

    def seek(self, place: int, whence: int = 0) -> int:
        """See ``RangeFile``."""
        return self._source.seek(place, whence)

    def read(self, size: int = -1) -> bytes:
        """The pages of the column, which Arrow reads at once.

        Raises:
            ArrowException: The pages differ from what the footer says; see ``in_words``.
            DataError: the file was replaced since the first read.
        """
        data = self._source.read(size)
        try:
            self._check(memoryview(data))
        except (IndexError, ValueError) as error:
            raise pa.ArrowInvalid(f"the pages of {self._path} are others than the footer says") from error
        return data

    def _check(self, data: memoryview) -> None:
        place = values = nbytes = 0
        while values < self._values and place < len(data):
            header, place = _thrift_struct(data, place)
            made, stored = _whole(header, 2), _whole(header, 3)
            nbytes += made
            if nbytes > self._max_bytes:
                raise ValueError("bytes")
            for field, encoding in ((5, 2), (8, 4)):  # data pages of version 1 and of version 2
                if isinstance(page := header.get(field), dict):
                    values += _whole(page, 1)
                    shares = _whole(page, encoding) == _DELTA_BYTE_ARRAY
                    if values > self._values or (shares and not self._may_share):
                        raise ValueError("values")
            if isinstance(page := header.get(7), dict) and _whole(page, 1) > made:  # a dictionary
                raise ValueError("values")
            place += stored


# The encoding by which values share their beginnings, in parquet.thrift; and structs within each other in a header.
_DELTA_BYTE_ARRAY = 7
_DEEPEST = 8
_Fields = dict[int, "int | _Fields"]


def _whole(fields: _Fields, number: int) -> int:
    value = fields.get(number)
    if not isinstance(value, int) or not 0 <= value < 1 << 31:
        raise ValueError("no whole number of 32 bits")
    return value


def _thrift_struct(data: memoryview, place: int, depth: int = 0) -> tuple[_Fields, int]:
    """Whole numbers and structs of one struct in Thrift's compact protocol, by their fields, and the place behind it.

    A page's header has no lists, sets or maps. See thrift-compact-protocol.md.
    """
    if depth > _DEEPEST:
        raise ValueError("too deep")
    found, number = _Fields(), 0
    while head := data[place]:
        place += 1
        if head >> 4:
            number += head >> 4
        else:
            number, place = _thrift_number(data, place)
        match head & 15:
            case 1 | 2:  # true and false
                pass
            case 3:
                place += 1
            case 4 | 5 | 6:
                found[number], place = _thrift_number(data, place)
            case 7:
                place += 8
            case 8:
                length, place = _thrift_number(data, place, is_signed=False)
                place += length
            case 12:
                found[number], place = _thrift_struct(data, place, depth + 1)
            case _:
                raise ValueError("no field of a page's header")
    return found, place + 1


def _thrift_number(data: memoryview, place: int, *, is_signed: bool = True) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[place]
        place += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return ((value >> 1) ^ -(value & 1) if is_signed else value), place
        if shift > 63:
            raise ValueError("no number of 64 bits")


def with_dictionaries(
    source: IO[bytes] | RangeFile, metadata: pq.FileMetaData, columns: Sequence[str], groups: Sequence[int]
) -> pq.ParquetFile:
    """A file of which some columns of texts and binary values are read as dictionaries, wherever that can be.

    A value that many rows have is then in memory once, as it is in the file.

    Args:
        source: the file.
        metadata: metadata of its footer.
        columns: paths of the columns.
        groups: numbers of the row groups that are to be read.
    """
    groups = [group for group in groups if metadata.row_group(group).num_rows]
    leaves = [metadata.schema.column(place) for place in range(metadata.num_columns)]
    wanted, chunks = tuple(f"{column}." for column in columns), ColumnChunks(metadata)
    kept = [
        place
        for place, leaf in enumerate(leaves)
        if f"{leaf.path}.".startswith(wanted)
        and leaf.physical_type == "BYTE_ARRAY"
        and all(keeps_dictionaries(chunks.of(group, place)) for group in groups)
    ]
    return reading_dictionaries(source, metadata, kept)


def reading_dictionaries(
    source: IO[bytes] | RangeFile, metadata: pq.FileMetaData, places: Sequence[int]
) -> pq.ParquetFile:
    """A file of which the columns of some numbers are read as dictionaries."""
    return pq.ParquetFile(
        pa.PythonFile(source, mode="r"),
        metadata=metadata,
        pre_buffer=False,
        read_dictionary=[metadata.schema.column(place).path for place in places],
    )


def keeps_dictionaries(about: pq.ColumnChunkMetaData) -> bool:
    """Whether a column of a row group holds texts or binary values that can be read as a dictionary."""
    fits = about.physical_type == "BYTE_ARRAY" and about.total_uncompressed_size < _LARGEST_DICTIONARY
    return bool(fits) and _KNOWN.issuperset(about.encodings)


def read_columns(source: RangeFile, metadata: pq.FileMetaData, object: str, names: Sequence[str]) -> pa.Table:
    """Columns beside the samples, of which texts may be dictionaries.

    Raises:
        DataError: The texts have far more bytes than the file once they are decoded.
    """
    groups = range(metadata.num_row_groups)
    file = with_dictionaries(source, metadata, names, groups)
    # Each by itself: a field of a struct has one dictionary at a time in Arrow.
    tables = [file.read_row_group(group, columns=list(names), use_threads=False) for group in groups]
    table = pa.concat_tables(tables) if tables else file.read(columns=list(names), use_threads=False)
    check_written_out(object, table)
    return table


# Texts of a column that may be so large however few bytes the file has, and so much larger than there.
_LARGEST_TEXTS, _LARGEST_GROWTH = 64 << 20, 64


def check_written_out(object: str, table: pa.Table) -> None:
    """Make sure that columns of a file have no far larger texts than the file itself once they are written out.

    Raises:
        DataError: naming the column that has.
    """
    most = max(_LARGEST_TEXTS, MAX_VALUES * VALUE_BYTES * len(table))
    for name in table.column_names:
        nbytes = written_out_bytes(table[name])
        if nbytes > most and nbytes > _LARGEST_GROWTH * table[name].nbytes:
            raise DataError(
                f"the column {name!r} of {object} has {nbytes} bytes written out, and {table[name].nbytes} in its "
                "file: take it away, or write shorter texts"
            )


def short_lists(table: pa.Table, paths: Sequence[str]) -> dict[str, pa.Array]:
    """Columns of lists of a table as texts, by their paths, without those whose lists are long once written out."""
    names = frozenset(table.column_names)
    found = {path: column_at(table, path) for path in paths if column_of(names, path) is not None}
    most = MAX_VALUES * VALUE_BYTES * len(table)
    return {path: in_json(column) for path, column in found.items() if written_out_bytes(column) <= most}


def written_out_bytes(column: pa.ChunkedArray | pa.Array) -> int:
    """Bytes of all values of a column as text, each by itself where several rows share one: 16 for a number."""
    if isinstance(column, pa.ChunkedArray):
        return sum(map(written_out_bytes, column.chunks))
    kind = column.type
    if pa.types.is_dictionary(kind):
        return _of_dictionary(column)
    if pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):
        return int(_view_lengths(column).sum())
    if pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind) or pa.types.is_run_end_encoded(kind):
        return sys.maxsize  # its rows may share values too, and nobody writes such metadata
    if pa.types.is_map(kind):
        return written_out_bytes(column.keys) + written_out_bytes(column.items)
    if pa.types.is_struct(kind):
        return VALUE_BYTES * len(column) + sum(map(written_out_bytes, column.flatten()))
    if pa.types.is_nested(kind):
        inner = column.flatten()
        return max(VALUE_BYTES * len(inner), written_out_bytes(inner))
    if is_text(kind) or holds_binary(kind):
        return int(pc.sum(pc.binary_length(column)).as_py() or 0)
    return VALUE_BYTES * len(column)


def _of_dictionary(column: pa.DictionaryArray) -> int:
    values = column.dictionary
    if pa.types.is_nested(values.type) or not (is_text(values.type) or holds_binary(values.type)):
        return VALUE_BYTES * len(column) + (written_out_bytes(values) if pa.types.is_nested(values.type) else 0)
    lengths = pa.array(_view_lengths(values)) if "view" in str(values.type) else pc.binary_length(values)
    return int(pc.sum(lengths.take(column.indices).cast(pa.int64())).as_py() or 0)


def _view_lengths(column: pa.Array) -> npt.NDArray[np.int64]:
    """Each view has 16 bytes, of which the first four are its length."""
    views = column.buffers()[1]
    if views is None:
        return np.zeros(len(column), np.int64)
    numbers = np.frombuffer(views, np.int32, 4 * len(column), 16 * column.offset)
    return np.where(np.asarray(column.is_valid()), numbers[::4], 0).astype(np.int64)


def list_columns(
    source: RangeFile, metadata: pq.FileMetaData, object: str, names: Sequence[str]
) -> dict[str, pa.Array]:
    """Columns of lists as texts, by their paths, without those whose lists have more than 256 values on average."""
    short = [name for name in names if _mean_values(metadata, name) <= MAX_VALUES]
    return short_lists(read_columns(source, metadata, object, short), short) if short else {}


def _mean_values(metadata: pq.FileMetaData, name: str) -> float:
    """Values of a sample's list, by what the file says of itself."""
    paths = [metadata.schema.column(place).path for place in range(metadata.num_columns)]
    leaves = [place for place, path in enumerate(paths) if path.startswith(f"{name}.")]
    groups = [group for group in range(metadata.num_row_groups) if metadata.row_group(group).num_rows]
    chunks = ColumnChunks(metadata)
    values = sum(chunks.of(group, place).num_values for group in groups for place in leaves)
    return float(values / max(1, metadata.num_rows))


# Reading on through what is not needed costs less than another round trip, up to about here.
_GAP_BYTES = 64 << 10
# A header with a name and a small member or two.
_MIN_BYTES = 8 << 10
_MAX_BYTES = 1 << 20
# Headers with long names, and contents that are looked into, are far smaller.
_LONGEST_BYTES = 16 << 20


class ObjectRanges:
    """As much of a file as ``tarfile`` needs of one. For one thread.

    Args:
        store: store that holds the object.
        entry: the entry in the store's listing.
    """

    def __init__(self, store: Versioned, entry: Entry) -> None:
        self._store = store
        self._entry = entry
        self._place = 0
        self._start = 0
        self._held = b""
        self._window = _MIN_BYTES

    def tell(self) -> int:
        """Where reading goes on."""
        return self._place

    def seek(self, place: int) -> int:
        """Go on from a place."""
        self._place = place
        return place

    def read(self, size: int) -> bytes:
        """The bytes from here on; raises what ``at`` raises."""
        data = self.at(self._place, size)
        self._place += len(data)
        return data

    def at(self, place: int, size: int) -> bytes:
        """The bytes at a place, or as many as the file has.

        Raises:
            DataError: The bytes are more than any header has, or the file has changed since it was listed.
            StoreError: the store failed.
        """
        if size > _LONGEST_BYTES:
            raise DataError(f"{self._entry.object} has a header of {size} bytes at byte {place}: it is damaged")
        size = min(size, self._entry.size - place)
        if size <= 0:
            return b""
        if not self._start <= place <= place + size <= self._start + len(self._held):
            self._fetch(place, size)
        return self._held[place - self._start : place - self._start + size]

    def _fetch(self, place: int, size: int) -> None:
        is_near = 0 <= place - self._start - len(self._held) + size < _GAP_BYTES
        self._window = min(2 * self._window, _MAX_BYTES) if is_near else _MIN_BYTES
        length = min(max(size, self._window), self._entry.size - place)
        data, version = self._store.read_version(self._entry.object, place, length)
        if is_other_version(self._entry.etag, version):
            raise DataError(f"{self._entry.object} changed while it was read: ask again when nobody writes to it")
        self._start, self._held = place, bytes(data)


HEADER_BYTES = 256
"""An upper bound of what stands before the numbers of an array."""

NUMBER_BYTES = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "FLOAT": 4, "DOUBLE": 8}
"""Bytes of a number once it is read, by the type that it has in the file."""


def arrays_of(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """The arrays of a column of lists of numbers, encoded; null where there is no list."""
    return pa.chunked_array([_encoded(chunk) for chunk in column.chunks], pa.large_binary())


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
