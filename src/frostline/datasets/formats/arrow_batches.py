"""Finds where the cells of an Arrow stream lie in its file, without reading the column whose cells they are."""

import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from frostline.datasets.formats.ranges import ObjectRanges
from frostline.errors import DataError

__all__ = ("ArrowStream", "CellPositions", "StreamedBatch")

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
        name: likewise.
        schema: schema of its columns.

    Raises:
        DataError: it does not begin as a stream does, or was changed since it was listed.
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
            start: where the message begins in the file.
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
                f"{self.name} is compressed, and compressed batches have no places to read at: write it again "
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

    def column(self, name: str) -> pa.Array:
        """A column's values.

        Raises:
            DataError: they are damaged or compressed.
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
            DataError: its offsets are damaged or compressed.
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
