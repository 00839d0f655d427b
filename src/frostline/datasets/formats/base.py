"""What a format of data is: one protocol, and the columns of the table that it makes of a store's listing."""

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from decimal import Decimal
from itertools import islice
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from frostline.core import OBJECTS, READINGS, Samples, Targets
from frostline.core.errors import DataError
from frostline.core.hints import HintingColumns
from frostline.core.nouns import Texts
from frostline.datasets.formats.left_out import LeftOut, is_hidden
from frostline.ordering import Chosen, Labels
from frostline.preprocess import Applied
from frostline.stores.protocols import Entries, Entry, ObjectStore

__all__ = (
    "COLUMNS",
    "MAX_VALUES",
    "TARGET_COLUMNS",
    "VALUE_BYTES",
    "ArrowTexts",
    "ChosenTexts",
    "ExternalReferences",
    "Format",
    "LabelSummary",
    "ListedSamples",
    "ManifestColumns",
    "PartOfSamples",
    "SelectedRows",
    "WholeSamples",
    "column_at",
    "column_of",
    "column_paths",
    "digest_of",
    "flatten_row",
    "holds_binary",
    "in_json",
    "is_hidden_member",
    "is_list",
    "is_named",
    "is_text",
    "label_column",
    "label_numbers",
    "list_column",
    "nested_names",
    "simple_type",
    "stable_ids",
    "without_extension",
)


COLUMNS = pa.schema(
    {
        "id": pa.int64(),
        "name": pa.string(),
        "object": pa.string(),
        "offset": pa.int64(),
        "length": pa.int64(),
        "label": pa.int64(),
        "etag": pa.string(),
    }
)
"""The columns that every table of samples starts with; what follows them is metadata. A label is null where a sample
has none, and nothing else is."""

TARGET_COLUMNS = pa.schema(
    {
        "target_object": pa.string(),
        "target_offset": pa.int64(),
        "target_length": pa.int64(),
        "target_etag": pa.string(),
        "target_width": pa.int64(),
        "target_height": pa.int64(),
    }
)
"""The columns that follow, without nulls, where samples have masks: where each one is, and the size of its image."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ListedSamples:
    """The samples of a listing.

    Attributes:
        table: ``COLUMNS`` in their order, none but that of labels with nulls, then any metadata columns. The rows'
            order follows from the listing alone, and is that of objects and offsets, so that reading all of it is
            reading on. Ids are ``stable_ids`` of the names, etags are those of the samples' objects.
        classes: names, by label.
        digest: result of the format's ``digest`` for this listing.
        reading: the way that the bytes at the samples' addresses are found.
        applied: preprocessing done before the images were kept; None where they are encoded.
        kept_at: name of the object that holds the table already; empty where it is to be kept as a manifest.
        divided_by_names: the column ``split`` was made of the names of folders or files, and is not the data's own.
        has_named_classes: labels were said by the names of classes; False where their numbers were said.
        declared: objects that declare one table of classes: ``all``, ``some``, or empty for none of them.
        used: names of objects that belong to the format and hold no sample, such as lists.
        left_out: rows, keys and columns that were looked at and are no samples.
        is_turned: the data's own reader turns images as their EXIF data says.
        named: names that the numbers of metadata columns stand for, by the column.
        read_again: objects whose rows the table has otherwise than they would be alone, as labels of another kind.
    """

    table: pa.Table
    classes: tuple[str, ...]
    digest: str
    reading: str = OBJECTS
    applied: Applied | None = None
    kept_at: str = ""
    divided_by_names: bool = False
    has_named_classes: bool = False
    declared: str = ""
    used: tuple[str, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    is_turned: bool = False
    named: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    read_again: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.table.schema.remove_metadata().names[: len(COLUMNS)] != COLUMNS.names:
            raise ValueError(f"a table of samples starts with {COLUMNS.names}, not {self.table.schema.names}")
        if self.reading not in READINGS:
            raise ValueError(f"there is no reading {self.reading!r}")


class Format(Protocol):
    """One way in which data lies in a store. Deciding what is mine is pure; only ``read`` asks the store."""

    @property
    def name(self) -> str:
        """What users call it: ``Dataset(url, format=name)``."""

    @property
    def is_incremental(self) -> bool:
        """``read`` takes rows from an earlier listing; where it does not, none is opened for it."""

    def claims(self, entries: Sequence[Entry]) -> bool:
        """Whether a listing looks like this format.

        It may be columns (``stores.protocols``), which a format that has many objects looks at as a whole.
        """

    def digest(self, entries: Sequence[Entry]) -> str:
        """SHA-256 that names what ``read`` would give, from names, sizes and etags alone, in any order.

        An unchanged listing finds its manifest by it, and nothing is read again. That of no entries names the rule by
        which ``read`` makes rows, and an earlier listing of another rule is not asked for rows.
        """

    def read(self, store: ObjectStore, entries: Sequence[Entry], before: ListedSamples | None = None) -> ListedSamples:
        """Make the table of a listing's samples.

        Args:
            store: store that was listed.
            entries: the listing.
            before: table that this format made of an earlier listing; rows of objects with their old name and etag, if
                that is not empty, are taken from it, and those objects are not read. Its texts may have wide offsets.

        Raises:
            EmptyDataset: the listing has no sample.
            DataError: the data cannot be used as it is; the sentence names the object.
            StoreError: the store failed.
        """


@runtime_checkable
class ExternalReferences(Format, Protocol):
    """A format whose samples may lie elsewhere than in the place that is listed: their objects are URLs."""

    def find_current(self, urls: Iterable[str]) -> Mapping[str, Entry]:
        """What objects elsewhere are now, by their URLs; those that are not there are left out.

        Raises:
            StoreError: a store failed.
        """


def digest_of(rule: str, entries: Iterable[Entry]) -> str:
    """SHA-256 of a format's rule and of the entries that belong to it, in any order.

    Args:
        rule: name of the format and the version of what it makes: another table of the same entries needs another rule.
        entries: objects of the listing; their names, sizes and etags count.
    """
    return Entries.of(entries).digest(rule)


def is_named(entries: Sequence[Entry], name: str) -> bool:
    """Whether an object of that name is listed."""
    return Entries.of(entries).has(name)


def is_hidden_member(name: str) -> bool:
    """Whether a tar's member belongs to no sample: it is hidden, or called as what tells of the tar, ``__x__``."""
    return is_hidden(name) or name.startswith("__")


_AT_ONCE = 1 << 13


def stable_ids(names: Sequence[str]) -> npt.NDArray[np.int64]:
    """Ids from names alone, so that a sample keeps its id whatever is added, taken away or moved to another store.

    Returns:
        ``int64[n]``, not negative: 63 bits of the BLAKE2b of each name.

    Raises:
        DataError: two names have one id, which happens once in some hundred million data sets of 100,000 names.
    """
    digests, rest = bytearray(), iter(names)
    while some := list(islice(rest, _AT_ONCE)):
        digests += b"".join([hashlib.blake2b(name.encode(), digest_size=8).digest() for name in some])
    ids: npt.NDArray[np.int64] = (np.frombuffer(digests, "<u8") >> np.uint64(1)).view(np.int64)
    in_order = np.sort(ids)
    if (in_order[1:] == in_order[:-1]).any():
        order = np.argsort(ids, kind="stable")
        first = int(np.flatnonzero(np.diff(ids[order]) == 0)[0])
        one, other = (names[row] for row in order[first : first + 2].tolist())
        raise DataError(f"{one!r} and {other!r} have the same 63-bit id: rename one of them")
    return ids


_Numbers = npt.NDArray[np.int64]

# So many texts are worth a list, which is faster to index; more stay in Arrow.
_LIST = 1 << 16
# Rows read from a mapped file before its pages are given back: a row may bring in 64 KiB of each column.
_TOUCHED_ROWS = 1 << 11
_SCAN_ROWS = 1 << 19  # whole bytes of a bitmap
# Where one row of so many is wanted, every page of a column is.
_NUMBERS_A_PAGE = 512


def label_column(labels: _Numbers) -> pa.Array:
    """Labels as a table has them: null where they are -1, which is what still stands below the null."""
    is_there = labels >= 0
    if is_there.all():
        return pa.array(labels)
    bits = np.packbits(is_there, bitorder="little")
    values = np.ascontiguousarray(labels, np.int64)
    return pa.Array.from_buffers(pa.int64(), len(labels), [pa.py_buffer(bits), pa.py_buffer(values)])


def label_numbers(column: pa.Array | pa.ChunkedArray) -> _Numbers:
    """Labels of a table as numbers: -1 where there is none."""
    return np.asarray(pc.fill_null(column, -1).to_numpy(), np.int64)


class SelectedRows(Protocol):
    """Rows chosen of a table; see ``ordering.Chosen`` and ``ordering.RowIndices``."""

    def __len__(self) -> int:
        """The number of rows."""

    @property
    def fingerprint(self) -> bytes:
        """Names exactly these rows."""

    def at(self, positions: _Numbers) -> _Numbers:
        """The rows at these positions of the choice."""

    def pieces(self) -> Iterator[_Numbers]:
        """All of them in order, some at a time."""


class ArrowTexts(Texts):
    """A column of strings.

    Args:
        column: strings without nulls, or a dictionary of such strings.
    """

    def __init__(self, column: pa.Array) -> None:
        self._column = column

    def __len__(self) -> int:
        return len(self._column)

    def take(self, rows: _Numbers) -> Sequence[str]:
        """See ``Texts.take``."""
        found = self._column.take(pa.array(rows))
        return found.to_pylist() if len(rows) <= _LIST else ArrowTexts(found)


class ChosenTexts(Texts):
    """Some rows of a column of texts, which are looked up when they are asked for."""

    def __init__(self, whole: Texts, rows: SelectedRows) -> None:
        self._whole = whole
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def take(self, rows: _Numbers) -> Sequence[str]:
        """See ``Texts.take``."""
        return self._whole.take(self._rows.at(rows))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LabelSummary:
    """What was worked out of a table's labels when its file was made, so that nobody need read them to split it.

    Attributes:
        first: see ``ordering.Labels``.
        counts: number of samples of each label, see ``ordering.Labels``.
        is_ascending: True if labels ascend with the rows, see ``ordering.Labels``.
        places: one column, of what ``ordering.places_by_label`` gives; None where rows stand in the order of labels.
    """

    first: int
    counts: _Numbers
    is_ascending: bool
    places: pa.Table | None


class ManifestColumns:
    """A manifest's table, one chunk a column, with what gives back the pages of the file that it may lie in.

    Args:
        table: the table without nulls in the columns that every table of samples has, but in that of labels.
        mapped: the memory map that it lies in; None where it lies in memory.
        known: the known classes of the labels; None where nothing is known.
    """

    def __init__(self, table: pa.Table, mapped: Any = None, known: LabelSummary | None = None) -> None:
        self.table = table
        self._mapped = mapped
        self._known = known

    def __len__(self) -> int:
        return int(self.table.num_rows)

    @property
    def is_mapped(self) -> bool:
        """Whether the table lies in a file, so that pages which were read can be given back."""
        return self._mapped is not None

    @property
    def labels(self) -> Labels | None:
        """The labels of all rows, where they were counted when the file was made."""
        known = self._known
        if known is None:
            return None
        return Labels(
            first=known.first,
            counts=known.counts,
            is_ascending=known.is_ascending,
            pieces=lambda: self.pieces("label"),
            places=None if known.places is None else ManifestColumns(known.places, self._mapped).places,
        )

    def pieces(self, name: str) -> Iterator[_Numbers]:
        """A column of whole numbers in order, some at a time; -1 stands for null."""
        for piece in self.scan((name,)):
            yield label_numbers(piece.column(0))

    def places(self) -> Iterator[npt.NDArray[Any]]:
        """The first column in order, some at a time, as wide as it is kept."""
        for piece in self.scan(self.table.column_names[:1]):
            yield piece.column(0).to_numpy()

    def numbers(self, name: str) -> _Numbers:
        """A column of whole numbers, viewed where it lies in a file or has no nulls; -1 stands for null."""
        column = self._array(name)
        if not column.null_count:
            return np.asarray(column.to_numpy(zero_copy_only=True), np.int64)
        if self._mapped is None:
            return label_numbers(column)
        # The file was written from ``label_column``, and a copy of a hundred million labels would not fit.
        values: _Numbers = np.frombuffer(column.buffers()[1], np.int64, len(column), 8 * column.offset)
        return values

    def texts(self, name: str) -> ArrowTexts:
        """A column of strings."""
        return ArrowTexts(self._array(name))

    def scan(self, names: Sequence[str]) -> Iterator[pa.Table]:
        """Some columns in pieces of some hundred thousand rows; pages of a piece are given back before the next."""
        chosen = self.table.select(list(names))
        with self._read_on(chosen):
            for start in range(0, len(self), _SCAN_ROWS):
                yield chosen.slice(start, _SCAN_ROWS)
                self.forget()

    def of(self, table: pa.Table) -> "ManifestColumns":
        """Another table of the same rows, columns of which may lie in the same file."""
        return ManifestColumns(table, self._mapped, self._known)

    def with_labels(self, labels: pa.Array) -> "ManifestColumns":
        """The same rows with other labels, as ``label_column`` makes them."""
        place = self.table.schema.get_field_index("label")
        return ManifestColumns(self.table.set_column(place, "label", labels), self._mapped)

    def forget(self) -> None:
        """Give pages back that were read from the file; they come again when they are read."""
        if self._mapped is not None:
            import mmap

            self._mapped.madvise(mmap.MADV_DONTNEED)

    @contextmanager
    def _read_on(self, table: pa.Table) -> Iterator[None]:
        """Have the system read ahead where columns lie: what is read here and there is read a page at a time."""
        if self._mapped is None:
            yield
            return
        import mmap

        places = list(self._places(table, mmap.PAGESIZE))
        for place in places:
            self._mapped.madvise(mmap.MADV_SEQUENTIAL, *place)
        try:
            yield
        finally:
            for place in places:
                self._mapped.madvise(mmap.MADV_RANDOM, *place)

    def _places(self, table: pa.Table, page: int) -> Iterator[tuple[int, int]]:
        """Where in the file the columns' bytes lie, by whole pages."""
        base, size = pa.py_buffer(self._mapped).address, len(self._mapped)
        buffers = (buffer for column in table.columns for chunk in column.chunks for buffer in chunk.buffers())
        for start, length in ((buffer.address - base, buffer.size) for buffer in buffers if buffer is not None):
            if 0 <= start < start + length <= size:
                yield start // page * page, length + start % page

    def _array(self, name: str) -> pa.Array:
        column = self.table.column(name)
        return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


class WholeSamples(HintingColumns):
    """All samples of a manifest; see ``core.SampleTable``."""

    def __init__(self, columns: ManifestColumns) -> None:
        self._columns = columns
        etags = columns.texts("etag")
        self._samples = Samples(
            ids=columns.numbers("id"),
            objects=columns.texts("object"),
            offsets=columns.numbers("offset"),
            lengths=columns.numbers("length"),
            labels=columns.numbers("label"),
            versions=etags,
            targets=_targets_of(columns),
        )

    def __len__(self) -> int:
        return len(self._samples)

    @property
    def has_targets(self) -> bool:
        """Rows that are taken say where their masks are."""
        return self._samples.targets is not None

    @property
    def ids(self) -> _Numbers:
        """A view."""
        return self._samples.ids

    @property
    def objects(self) -> Sequence[str]:
        """Looked up when asked for."""
        return self._samples.objects

    @property
    def offsets(self) -> _Numbers:
        """A view."""
        return self._samples.offsets

    @property
    def lengths(self) -> _Numbers:
        """A view."""
        return self._samples.lengths

    @property
    def labels(self) -> _Numbers:
        """A view."""
        return self._samples.labels

    @property
    def versions(self) -> Sequence[str]:
        """Looked up when asked for."""
        return self._samples.versions

    @property
    def encoded_bytes(self) -> int:
        """The bytes of all encoded samples together: one pass over a column."""
        return sum(int(pc.sum(piece.column(0)).as_py() or 0) for piece in self._columns.scan(("length",)))

    def take(self, rows: _Numbers) -> Samples:
        """The given rows as columns of their own."""
        found = self._samples.take(rows)
        self._columns.forget()
        return found

    def ids_at(self, rows: _Numbers) -> _Numbers:
        """The ids of the given rows."""
        return self._at(self._samples.ids, rows)

    def labels_at(self, rows: _Numbers) -> _Numbers:
        """The labels of the given rows."""
        return self._at(self._samples.labels, rows)

    def column_at(self, name: str, rows: _Numbers) -> _Numbers:
        """Numbers of the given rows."""
        return self._at(self._columns.numbers(name), rows)

    def pieces(self, name: str, rows: SelectedRows | None) -> Iterator[_Numbers]:
        """A column of whole numbers in order, some at a time: of the given rows, or of all."""
        if rows is None:
            yield from self._columns.pieces(name)
        elif isinstance(rows, Chosen) and len(rows) * _NUMBERS_A_PAGE >= len(self):
            yield from self._chosen(name, rows)
        else:
            for some in rows.pieces():
                yield self.column_at(name, some)

    def _chosen(self, name: str, rows: Chosen) -> Iterator[_Numbers]:
        """Numbers of ascending rows that lie in every page, which are read on and not looked up one by one."""
        start = 0
        for piece in self._columns.pieces(name):
            bits = rows.bits[start // 8 : -(-(start + len(piece)) // 8)]
            yield piece[np.unpackbits(bits, count=len(piece), bitorder="little").view(np.bool_)]
            start += len(piece)

    def _at(self, column: _Numbers, rows: _Numbers) -> _Numbers:
        if not self._columns.is_mapped:
            return column[rows]
        out = np.empty(len(rows), np.int64)
        for start in range(0, len(rows), _TOUCHED_ROWS):
            out[start : start + _TOUCHED_ROWS] = column[rows[start : start + _TOUCHED_ROWS]]
            self._columns.forget()
        return out


class PartOfSamples(HintingColumns):
    """Some rows of a manifest; see ``core.SampleTable``. Nothing is copied but what is asked for."""

    def __init__(self, whole: WholeSamples, rows: SelectedRows) -> None:
        self._whole = whole
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def ids(self) -> _Numbers:
        """Copied at each access."""
        return self._all("id")

    @property
    def objects(self) -> Sequence[str]:
        """Looked up when asked for."""
        return self.texts_of(self._whole.objects)

    @property
    def offsets(self) -> _Numbers:
        """Copied at each access."""
        return self._all("offset")

    @property
    def lengths(self) -> _Numbers:
        """Copied at each access."""
        return self._all("length")

    @property
    def labels(self) -> _Numbers:
        """Copied at each access."""
        return self._all("label")

    @property
    def versions(self) -> Sequence[str]:
        """Looked up when asked for."""
        return self.texts_of(self._whole.versions)

    @property
    def encoded_bytes(self) -> int:
        """The bytes of all encoded samples together: one pass over a column."""
        return sum(int(some.sum()) for some in self._whole.pieces("length", self._rows))

    def take(self, rows: _Numbers) -> Samples:
        """The given rows of the part as columns of their own."""
        return self._whole.take(self._rows.at(rows))

    def ids_at(self, rows: _Numbers) -> _Numbers:
        """The ids of the given rows of the part."""
        return self._whole.ids_at(self._rows.at(rows))

    def labels_at(self, rows: _Numbers) -> _Numbers:
        """The labels of the given rows of the part."""
        return self._whole.labels_at(self._rows.at(rows))

    def _all(self, name: str) -> _Numbers:
        return np.concatenate([np.zeros(0, np.int64), *self._whole.pieces(name, self._rows)])

    def texts_of(self, whole: Sequence[str]) -> Sequence[str]:
        """The texts of the part's rows, of a column of the whole."""
        assert isinstance(whole, Texts), "a manifest's texts are looked up"
        return ChosenTexts(whole, self._rows)


def _targets_of(columns: ManifestColumns) -> Targets | None:
    if not set(TARGET_COLUMNS.names) <= set(columns.table.column_names):
        return None
    return Targets(
        objects=columns.texts("target_object"),
        offsets=columns.numbers("target_offset"),
        lengths=columns.numbers("target_length"),
        versions=columns.texts("target_etag"),
        widths=columns.numbers("target_width"),
        heights=columns.numbers("target_height"),
    )


# Longer lists are data and not what is said of it: a table of samples would be as large as they are.
MAX_VALUES = 256
"""Values of a list, on average, with which a column is still what is said of samples."""
VALUE_BYTES = 16
"""Of the text that a number takes."""


def is_list(kind: pa.DataType) -> bool:
    """Whether values of that type are lists of numbers, truth values or texts, or lists of lists of numbers."""
    inner = _inner(kind)
    if inner is None:
        return False
    deepest = _inner(inner)
    return _is_number(inner) or is_text(inner) if deepest is None else _is_number(deepest)


def column_paths(schema: pa.Schema) -> list[tuple[str, pa.DataType]]:
    """The paths of all columns and their types; the fields of a struct, such as ``objects.bbox``, are columns too."""
    return list(_fields(schema))


def nested_names(schema: pa.Schema) -> tuple[str, ...]:
    """The paths of the columns whose values are lists, maps or structs, and hold no binary values."""
    return tuple(path for path, kind in _fields(schema) if pa.types.is_nested(kind) and _is_written_out(kind))


def _is_written_out(kind: pa.DataType) -> bool:
    """Whether values of a type can be written out as text: no views of lists and no unions, whose rows share values."""
    if pa.types.is_nested(kind):
        is_known = pa.types.is_struct(kind) or pa.types.is_map(kind) or _inner(kind) is not None
        return is_known and all(_is_written_out(kind.field(place).type) for place in range(kind.num_fields))
    return not pa.types.is_run_end_encoded(kind) and not holds_binary(kind)


def holds_binary(kind: pa.DataType) -> bool:
    """Whether values of a type are binary, or have binary values in them."""
    if pa.types.is_nested(kind):
        return any(holds_binary(kind.field(place).type) for place in range(kind.num_fields))
    if pa.types.is_dictionary(kind):
        return holds_binary(kind.value_type)
    return bool(
        pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_binary_view(kind)
        or pa.types.is_fixed_size_binary(kind)
    )


def list_column(values: Sequence[Any]) -> pa.Array | None:
    """Values of one field of JSON as texts; None where they are too long to be kept.

    Args:
        values: value of each sample; None where it has none.
    """
    column = in_json(values)
    nbytes = sum(len(text) for text in column.to_pylist() if text)
    return None if nbytes > MAX_VALUES * VALUE_BYTES * len(values) else column


def in_json(values: pa.ChunkedArray | Sequence[Any]) -> pa.Array:
    """Values as JSON, null where there is none: numbers with a fraction keep their point, texts stay as they are."""
    plain = values.to_pylist(maps_as_pydicts="lossy") if isinstance(values, pa.ChunkedArray) else values
    return pa.array([_text(value) for value in plain], pa.string())


def _text(value: Any) -> str | None:
    if value is None or value != value:
        return None
    # JSON can escape halves of characters, which cannot be written down.
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    return json.dumps(value, ensure_ascii=True, default=_plain)


def _plain(value: Any) -> Any:
    """A value that JSON has no type for: a decimal as a number where none of its digits is lost, else as text."""
    if isinstance(value, Decimal) and Decimal(repr(float(value))) == value:
        return float(value)
    return str(value)


def _inner(kind: pa.DataType) -> pa.DataType | None:
    is_one = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    return kind.value_type if is_one else None


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def simple_type(kind: pa.DataType) -> pa.DataType:
    """The type of the values of a column: of a dictionary that of its values, of an extension what it stands for."""
    if isinstance(kind, pa.UuidType | pa.JsonType):
        return pa.string()
    if isinstance(kind, pa.Bool8Type):
        return pa.bool_()
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def without_extension(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """A column of UUIDs, of JSON or of truth values in bytes as one of texts or truth values; others as they are."""
    if isinstance(column.type, pa.UuidType):
        return pa.chunked_array([[None if key is None else str(key) for key in column.to_pylist()]], pa.string())
    if isinstance(column.type, pa.JsonType | pa.Bool8Type):
        return column.cast(column.type.storage_type).cast(simple_type(column.type))
    return column


def is_text(kind: pa.DataType) -> bool:
    """Whether values of a type are texts."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _fields(schema: pa.Schema) -> Iterator[tuple[str, pa.DataType]]:
    for column in schema:
        if pa.types.is_struct(column.type):
            yield from ((f"{column.name}.{inner.name}", inner.type) for inner in column.type)
        else:
            yield column.name, column.type


def column_at(table: pa.Table, path: str) -> pa.ChunkedArray:
    """A column by its path; see ``column_paths``."""
    outer, schema = path, table.schema  # whose names are a list that is made anew each time
    while (place := schema.get_field_index(outer)) < 0:
        outer, dot, _ = outer.rpartition(".")
        assert dot, "a path leads into a column"
    column = table.column(place)
    return column if outer == path else pc.struct_field(column, path[len(outer) + 1 :])


def column_of(names: Collection[str], path: str) -> str | None:
    """The column that a path leads into, whose own name may have dots in it; None where there is none of these."""
    while path not in names:
        path, dot, _ = path.rpartition(".")
        if not dot:
            return None
    return path


def flatten_row(row: Mapping[str, Any], twice: set[str]) -> dict[str, Any]:
    """A row of JSON with the fields of an object as fields of their own, such as ``objects.bbox``, as of a struct.

    Args:
        row: row to flatten.
        twice: set to which the names are added that two fields would have; the row's own field counts, else the first.
    """
    found: dict[str, Any] = {}
    for name, value in row.items():
        if not isinstance(value, dict):
            twice.update({name} & found.keys())
            found[name] = value
            continue
        for inner, said in value.items():
            path = f"{name}.{inner}"
            twice.update({path} & found.keys())
            found.setdefault(path, said)
    return found
