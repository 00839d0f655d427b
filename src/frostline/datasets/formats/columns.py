"""The columns of a manifest: Arrow in memory or in a mapped file, seen as numbers and texts without a copy."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from frostline.core import Samples, Targets
from frostline.core.samples import Texts
from frostline.datasets.formats.base import TARGET_COLUMNS
from frostline.ordering import Chosen, Labels

__all__ = (
    "ArrowTexts",
    "ChosenTexts",
    "LabelSummary",
    "ManifestColumns",
    "PartOfSamples",
    "SelectedRows",
    "WholeSamples",
)

_Numbers = npt.NDArray[np.int64]

# So many texts are worth a list, which is faster to index; more stay in Arrow.
_LIST = 1 << 16
# Rows read from a mapped file before its pages are given back: a row may bring in 64 KiB of each column.
_TOUCHED_ROWS = 1 << 11
_SCAN_ROWS = 1 << 19  # whole bytes of a bitmap
# Where one row of so many is wanted, every page of a column is.
_NUMBERS_A_PAGE = 512


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
        counts: likewise.
        is_ascending: likewise.
        places: one column, of what ``ordering.places_by_label`` gives; None where rows stand in the order of labels.
    """

    first: int
    counts: _Numbers
    is_ascending: bool
    places: pa.Table | None


class ManifestColumns:
    """A manifest's table, one chunk a column, with what gives back the pages of the file that it may lie in.

    Args:
        table: without nulls in the columns that every table of samples has.
        mapped: the memory map that it lies in; None where it lies in memory.
        known: known classes of the labels; None where nothing is known.
    """

    def __init__(self, table: pa.Table, mapped: Any = None, known: LabelSummary | None = None) -> None:
        self.table = table
        self._mapped = mapped
        self._known = known

    def __len__(self) -> int:
        return int(self.table.num_rows)

    @property
    def is_mapped(self) -> bool:
        """It lies in a file, and pages that were read can be given back."""
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
        """A column of whole numbers in order, some at a time."""
        for piece in self.scan((name,)):
            yield np.asarray(piece.column(0).to_numpy(), np.int64)

    def places(self) -> Iterator[npt.NDArray[Any]]:
        """The first column in order, some at a time, as wide as it is kept."""
        for piece in self.scan(self.table.column_names[:1]):
            yield piece.column(0).to_numpy()

    def numbers(self, name: str) -> _Numbers:
        """A column of whole numbers, viewed."""
        return np.asarray(self._array(name).to_numpy(zero_copy_only=True), np.int64)

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


class WholeSamples:
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

    def lengths_at(self, rows: _Numbers) -> _Numbers:
        """The lengths of the given rows."""
        return self._at(self._samples.lengths, rows)

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


class PartOfSamples:
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
