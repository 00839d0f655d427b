"""Columns of Parquet files are decoded in child processes, which have nothing of the file but what they were given.

Run as a program, it is what forks them: it knows samples, as ``preprocess.decoder_process`` does, and these columns.
"""

import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from itertools import accumulate
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from frostline.core.errors import DataError
from frostline.datasets.formats.parquet import (
    CellFile,
    CellPlan,
    Cells,
    Holding,
    cells_bytes,
    group_cells,
    place_of_leaf,
)
from frostline.datasets.formats.ranges import MAGICS, RangeFile, in_words, parquet_file
from frostline.preprocess.decoder_process import serve_decoding

__all__ = ("CellsApart", "column_of_group")


_Run = Callable[..., tuple[list[int], bytes]]
"""``Decoders.run`` for a tenant."""

_KIND = "column"
# The end of a file that Arrow reads first, and the least that is read of one here.
_END_BYTES = 64 << 10
_MAGIC_BYTES = 8
_NUMBER_BYTES = 8
# A footer takes so many times its bytes while it is read, and a column: compressed, a page of it, and as values.
_FOOTER_GROWTH, _COLUMN_GROWTH = 64, 4
# A column that is being decoded lies in memory that is shared twice, in the child, and then in this process.
_WHILE_DECODED = 4
# Arrow reads a little more than a column, where old writers counted too little.
_MORE_BYTES = 4096
_MAX_GROUPS = 1 << 16


class CellsApart:
    """Reads columns of Parquet files for a tenant, as ``CellsHere`` does, in its child processes. Safe for threads.

    What a child answers is checked: another column of the same tenant may have taken it over.

    Args:
        run: function that has a child of the tenant do something.
        tenant: name of the tenant, whose columns are kept for it alone.
    """

    def __init__(self, run: _Run, tenant: str) -> None:
        self.tenant = tenant
        self._run = run

    def open(self, source: RangeFile, holding: Holding) -> CellFile:
        """See ``CellDecoder``."""
        name, size = source.name, source.size
        end = _read(source, max(0, size - _END_BYTES), min(size, _END_BYTES))
        said = int.from_bytes(end[-_MAGIC_BYTES : -_MAGIC_BYTES // 2], "little") + _MAGIC_BYTES
        if end.endswith(MAGICS) and len(end) < said <= size:  # other objects may say any number there
            end = _read(source, size - said, said)
        takes, most = _FOOTER_GROWTH * len(end), _NUMBER_BYTES * _MAX_GROUPS
        with holding(takes):
            (made, *_), groups = self._run(_KIND, {"name": name, "size": size}, [end], made_bytes=most, may_take=takes)
        ends = np.frombuffer(groups, np.int64, made // _NUMBER_BYTES)
        if len(ends) and (ends[0] < 0 or np.any(np.diff(ends) < 0)):
            raise DataError(f"{name} has row groups of less than no rows: it is damaged")
        # Others keep it parsed, which takes more: as bytes it counts for half of them.
        return CellFile(footer=end, ends=ends.tolist(), etag=source.version, nbytes=len(end) // 2)

    def plan(
        self, source: Callable[[], RangeFile], file: CellFile, group: int, column: str, holding: Holding
    ) -> CellPlan:
        """See ``CellDecoder``."""
        footer, opened = file.footer, source()
        name, size = opened.name, opened.size
        asked = {"name": name, "size": size, "group": group, "column": column}
        takes = _FOOTER_GROWTH * len(footer)
        with holding(takes):
            said, _ = self._run(_KIND, asked, [footer], made_bytes=0, may_take=takes)
        nbytes, place, length = _numbers(name, said)
        rows = file.ends[group] - (file.ends[group - 1] if group else 0)
        if not 0 <= length <= nbytes + _MORE_BYTES or not 0 <= place <= size - length:
            raise DataError(f"{name} has a column that lies outside of it: it is damaged")
        if 2 * _NUMBER_BYTES * rows > nbytes:
            raise DataError(f"{name} has more rows than a column of that size: it is damaged")

        def decode() -> tuple[Cells, str]:
            pages = _read(opened, place, length)
            most = nbytes + 2 * _NUMBER_BYTES * rows
            (made, *more), data = self._run(
                _KIND,
                {**asked, "place": place},
                [footer, pages],
                made_bytes=most,
                may_take=takes + _COLUMN_GROWTH * most,
            )
            _, _, left = _numbers(name, [made, *more])
            if left:
                raise DataError(f"{name} has a column whose pages lie apart: write it again")
            return _cells(name, data, rows), opened.version

        return CellPlan(nbytes=nbytes, takes=_WHILE_DECODED * nbytes + takes, decode=decode)


def _read(source: RangeFile, place: int, length: int) -> bytes:
    source.seek(place)
    return source.read(length)


def _numbers(name: str, said: Sequence[int]) -> tuple[int, int, int]:
    if len(said) != 4:
        raise DataError(f"{name} cannot be read: the process that decodes it gave an answer that is none")
    return said[1], said[2], said[3]


def _cells(name: str, data: bytes, rows: int) -> Cells:
    """The cells as a child made them: where each begins, its length, and then all of them.

    Raises:
        DataError: The cells lie outside of what it made.
    """
    if len(data) < 2 * _NUMBER_BYTES * rows:
        raise DataError(f"{name} has fewer rows than its footer says: it is damaged")
    starts, lengths = np.frombuffer(data, np.int64, 2 * rows).reshape(2, rows)
    most = len(data)
    if rows and (starts.min() < 0 or starts.max() > most or lengths.max() > most or (starts + lengths).max() > most):
        raise DataError(f"{name} cannot be read: the process that decodes it gave an answer that is none")
    return Cells(parts=(memoryview(data),), part=np.zeros(rows, np.int64), starts=starts, lengths=lengths)


# What runs in a child.


class _Missing(Exception):
    """Bytes of the file that the child was not given."""

    def __init__(self, place: int, length: int) -> None:
        super().__init__(place, length)
        self.place, self.length = place, length


class _Given(RangeFile):
    """A file of which one part is there, which is read without a copy.

    Args:
        name: name of the object.
        size: size of the object in bytes.
        start: place at which the part begins.
        part: bytes that are there.
    """

    def __init__(self, name: str, size: int, start: int, part: memoryview) -> None:
        self.version, self.name, self.size, self._place = "", name, size, 0
        self._start, self._part = start, part

    def read(self, size: int = -1) -> memoryview:  # type: ignore[override]
        """The bytes from here on, as many as there are.

        Raises:
            _Missing: The bytes were not given.
        """
        left = max(0, self.size - self._place)
        length = left if size < 0 else min(size, left)
        start = self._place - self._start
        if not 0 <= start <= start + length <= len(self._part):
            raise _Missing(self._place, length)
        self._place += length
        return self._part[start : start + length]


def column_of_group(asked: Mapping[str, Any], pieces: Sequence[memoryview], made: memoryview) -> list[int]:
    """Where the row groups of a Parquet file end; or a column of one, as ``CellsApart`` takes it.

    Args:
        asked: name and size of the file; number of a row group, path of a column and place of its pages, as far as
            they are known.
        pieces: end of the file, with its footer; and the pages of the column.
        made: memory for what is read.

    Returns:
        The number of bytes that were made; the most bytes of the cells; place and length of the pages, if these are
        missing.

    Raises:
        DataError: the file is damaged.
        ObjectNotFound: there is no such column.
    """
    name, size = asked["name"], asked["size"]
    source = _Given(name, size, size - len(pieces[0]), pieces[0])
    with in_words(name):
        parquet = parquet_file(source)
        metadata = parquet.metadata
        if "group" not in asked:
            ends = np.array(
                [*accumulate(metadata.row_group(group).num_rows for group in range(parquet.num_row_groups))]
            )
            return [_write(made, ends.astype(np.int64).tobytes()), 0, 0, 0]
        nbytes = cells_bytes(metadata, asked["group"], place_of_leaf(metadata, asked["column"]))
        try:
            pages = _Given(name, size, asked.get("place", 0), pieces[-1] if "place" in asked else memoryview(b""))
            cells = group_cells(pages, metadata, asked["group"], asked["column"])
        except _Missing as missing:
            return [0, nbytes, missing.place, missing.length]
        return [_write_cells(made, cells), nbytes, 0, 0]


def _write(made: memoryview, data: bytes | memoryview, place: int = 0) -> int:
    if place + len(data) > len(made):
        raise DataError("a column has more bytes than the file's footer says")
    made[place : place + len(data)] = data
    return place + len(data)


def _write_cells(made: memoryview, cells: Cells) -> int:
    place = 2 * _NUMBER_BYTES * len(cells)
    starts = np.where(cells.lengths < 0, 0, cells.starts)
    for number, part in enumerate(cells.parts):
        is_here = (cells.part == number) & (cells.lengths > 0)
        if not is_here.any():
            starts[cells.part == number] = 0
            continue
        first, last = cells.starts[is_here].min(), (cells.starts + cells.lengths)[is_here].max()
        starts[is_here] += place - first
        starts[(cells.part == number) & ~is_here] = 0
        place = _write(made, part[first:last].cast("B"), place)
    _write(made, np.stack([starts, cells.lengths]).astype(np.int64).tobytes())
    return place


def _warm_up() -> None:
    """Read a file once, which loads what children cannot load."""
    file = BytesIO()
    pq.write_table(pa.table({"x": pa.array([b"one", b"other"])}), file)
    end, size = memoryview(file.getvalue()), len(file.getvalue())
    column_of_group({"name": "x", "size": size, "group": 0, "column": "x"}, [end], memoryview(bytearray(1024)))


if __name__ == "__main__":
    _warm_up()
    serve_decoding(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), {_KIND: column_of_group})
