"""A listing as columns: some seventy bytes beside the names, where values of Python's own take three hundred."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import overload

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from frostline.core.samples import Texts
from frostline.stores.base.protocols import Entry

__all__ = ("Entries", "Names")

_COLUMNS = pa.schema({"object": pa.string(), "size": pa.int64(), "etag": pa.string()})
# Held as values of Python's own while they are put into columns, or taken out of them.
_AT_ONCE = 1 << 13
# Rows and bytes of what is put in order at once: offsets into texts have 32 bits.
_SORTED_ROWS, _SORTED_BYTES = 1 << 20, 1 << 31
_STRETCHES = 64


class Names(Texts):
    """A column of texts in several pieces, made to be gone through.

    Args:
        column: column of strings without nulls.
    """

    def __init__(self, column: pa.ChunkedArray) -> None:
        self._column = column

    def __len__(self) -> int:
        return len(self._column)

    def __iter__(self) -> Iterator[str]:
        for chunk in self._column.chunks:
            for start in range(0, len(chunk), _AT_ONCE):
                yield from chunk.slice(start, _AT_ONCE).to_pylist()

    def take(self, rows: npt.NDArray[np.int64]) -> Sequence[str]:
        """See ``Texts.take``."""
        found: list[str] = self._column.take(pa.array(rows)).to_pylist()
        return found


class Entries(Sequence[Entry]):
    """Entries of a listing, made when they are asked for. Immutable, safe for threads.

    Iterating makes some thousand at a time; the columns are much faster where they are enough.

    Args:
        table: columns ``object``, ``size`` and ``etag``, without nulls.
        is_in_order: they stand in the order of their names.
    """

    def __init__(self, table: pa.Table, *, is_in_order: bool = False) -> None:
        self.table = table
        self.is_in_order = is_in_order

    @classmethod
    def of(cls, entries: Iterable[Entry]) -> "Entries":
        """The same entries as columns; those that are columns already are taken as they are."""
        if isinstance(entries, Entries):
            return entries
        rest, found = iter(entries), []
        while some := list(islice(rest, _AT_ONCE)):
            found.append(pa.record_batch(list(zip(*some, strict=True)), schema=_COLUMNS))
        return cls(pa.Table.from_batches(found, _COLUMNS))

    @classmethod
    def gathered(cls, parts: "list[Entries]") -> "Entries":
        """Those of several listings, in the order of their names. The list is emptied: what it held makes room."""
        columns = list(pa.concat_tables([part.table for part in parts] or [_COLUMNS.empty_table()]).columns)
        parts.clear()
        table = _in_order(columns)
        pa.default_memory_pool().release_unused()
        return cls(table, is_in_order=True)

    def __len__(self) -> int:
        return int(self.table.num_rows)

    @overload
    def __getitem__(self, row: int) -> Entry: ...

    @overload
    def __getitem__(self, row: slice) -> Sequence[Entry]: ...

    def __getitem__(self, row: int | slice) -> Entry | Sequence[Entry]:
        """One entry, or those of a slice."""
        if isinstance(row, slice):
            start, stop, step = row.indices(len(self))
            if step != 1:
                return [self[place] for place in range(start, stop, step)]
            return Entries(self.table.slice(start, max(0, stop - start)), is_in_order=self.is_in_order)
        place = row + len(self) if row < 0 else row
        if not 0 <= place < len(self):
            raise IndexError(f"row {row} lies outside the {len(self)} entries")
        return next(iter(Entries(self.table.slice(place, 1))))

    def __iter__(self) -> Iterator[Entry]:
        for piece in self.pieces():
            yield from map(Entry, *(column.to_pylist() for column in piece.columns))

    def pieces(self) -> Iterator[pa.RecordBatch]:
        """The columns in pieces of some thousand rows."""
        yield from self.table.to_batches(max_chunksize=_AT_ONCE)

    def in_order(self) -> "Entries":
        """The same entries in the order of their names, which is that of texts in Python and in UTF-8."""
        if self.is_in_order:
            return self
        return Entries(_in_order(list(self.table.columns)), is_in_order=True)

    def where(self, mask: pa.ChunkedArray) -> "Entries":
        """Those for which a mask is true. Nothing is copied where they lie in few stretches, as in order they do."""
        chosen = np.concatenate([[False], mask.to_numpy(), [False]])
        edges = np.flatnonzero(chosen[1:] != chosen[:-1]).tolist()
        if len(edges) > 2 * _STRETCHES:
            return Entries(self.table.filter(mask), is_in_order=self.is_in_order)
        parts = [self.table.slice(start, stop - start) for start, stop in zip(edges[::2], edges[1::2], strict=True)]
        return Entries(pa.concat_tables(parts or [_COLUMNS.empty_table()]), is_in_order=self.is_in_order)

    def under(self, start: str) -> "Entries":
        """Those whose names begin so."""
        return self.where(pc.starts_with(self.table["object"], start))

    def matching(self, pattern: str) -> "Entries":
        """Those in whose names a regular expression, as RE2 reads them, is found."""
        return self.where(pc.match_substring_regex(self.table["object"], pattern))

    def has(self, name: str) -> bool:
        """Whether one of them has that name."""
        return bool(pc.index(self.table["object"], pa.scalar(name, _COLUMNS.types[0])).as_py() >= 0)

    def digest(self, rule: str) -> str:
        """SHA-256 of a rule and of all entries in their order: names, sizes and etags, each ended by a NUL."""
        # A name holds no NUL, so that the columns cannot run into each other.
        digest = hashlib.sha256(f"{rule}\0".encode())
        for piece in self.in_order().pieces():
            said = pc.binary_join_element_wise(
                piece["object"], piece["size"].cast(pa.string()), piece["etag"], "", "\0"
            )
            digest.update("".join(said.to_pylist()).encode())
        return digest.hexdigest()

    def __repr__(self) -> str:
        return f"<{len(self)} entries>"


def _in_order(columns: list[pa.ChunkedArray]) -> pa.Table:
    """The columns in the order of the first, each taken out of the list before the next is put in order."""
    order = pc.sort_indices(columns[0])
    taken = []
    while columns:
        taken.append(_taken(columns.pop(0), order))
    return pa.table(taken, _COLUMNS)


def _taken(column: pa.ChunkedArray, order: pa.Array) -> pa.ChunkedArray:
    kind = column.type
    if column.nbytes >= _SORTED_BYTES:
        column = column.cast(pa.large_string())
    whole = column.combine_chunks()
    del column
    pieces = (order.slice(start, _SORTED_ROWS) for start in range(0, len(order), _SORTED_ROWS))
    return pa.chunked_array([whole.take(piece).cast(kind) for piece in pieces], kind)
