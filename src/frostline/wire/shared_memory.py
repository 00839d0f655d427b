"""Rows in shared memory between processes of one machine: frames on a socket, blocks, and views of them.

Frames on a socket between processes of one machine: JSON, bytes behind it, and descriptors that travel with it.

A frame is sixteen bytes (a mark, the length of the JSON, the length of what follows it), a JSON object, and bytes. A
descriptor travels beside the first byte (``SCM_RIGHTS``), where the receiver says that it takes one; the system
closes any other that comes. Nothing of it is evaluated.

How rows lie in a block of shared memory: which bytes go where, and arrays that view them at the other end. Pure.

A block holds the columns of one batch, one after the other, each at a multiple of 64 bytes: ids, and then either the
encoded samples with where each begins, or tensors, or packed tensors. What says where they lie is plain values, which
travel beside the block. Rows of several batches lie together where they are alike, and are copied once, into the
block.
"""

import array
import json
import math
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from frostline.core import FeatureBatch, PackedTensor, Skipped
from frostline.core.declared import parse_json
from frostline.core.errors import FrostlineError
from frostline.core.system import crc32
from frostline.wire.codecs import CODECS

__all__ = (
    "BACK",
    "CLOSED",
    "PROTOCOL",
    "RECORD",
    "Block",
    "BrokenFrame",
    "Frame",
    "RowBlock",
    "is_alike",
    "lay_out",
    "read_block",
    "receive",
    "row_bytes",
    "send",
)


PROTOCOL = 1
"""Of what is said in frames to an I/O service: raised where an older side would not understand it."""

RECORD = struct.Struct("<QII")
"""What a session says while it runs: the number of an answer, ``BACK`` or ``CLOSED``, and a number."""

BACK = 0
"""It has done with the block of that number."""

CLOSED = 1
"""It closed the answer, of which it got the blocks below that number."""

_HEADER = struct.Struct("<4sIQ")
_MARK = b"frst"
_MAX_JSON = 64 << 20
_DESCRIPTOR = socket.CMSG_SPACE(array.array("i").itemsize)


class BrokenFrame(FrostlineError):
    """What came is no frame."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Frame:
    """What came.

    Attributes:
        says: the JSON object.
        body: the bytes behind it.
        descriptor: descriptor of an open file, which is the receiver's to close; -1 where none came.
    """

    says: dict[str, Any]
    body: memoryview = field(default_factory=lambda: memoryview(b""))
    descriptor: int = -1

    def close(self) -> None:
        """Close the descriptor that nobody took."""
        if self.descriptor >= 0:
            os.close(self.descriptor)


def send(
    to: socket.socket, says: dict[str, Any], body: bytes | memoryview = b"", *, descriptor: int | None = None
) -> None:
    """Send a frame; the caller sees to it that nobody else sends on the socket meanwhile.

    Raises:
        OSError: The peer is gone, or takes nothing for longer than the socket waits.
    """
    text = json.dumps(says, separators=(",", ":")).encode()
    data = _HEADER.pack(_MARK, len(text), len(body)) + text
    if descriptor is None:
        to.sendall(data)
    else:
        sent = to.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))])
        to.sendall(memoryview(data)[sent:])
    if len(body):
        to.sendall(body)


def receive(come_from: socket.socket, *, max_bytes: int = 0, takes_descriptor: bool = False) -> Frame | None:
    """The next frame; None where the peer has ended between two of them.

    Args:
        come_from: a connected stream socket.
        max_bytes: maximum bytes that may stand behind the JSON.
        takes_descriptor: one may come; it is closed where the frame breaks off.

    Raises:
        BrokenFrame: The bytes are not a frame, or break off.
        OSError: The peer is gone, or sends nothing for longer than the socket waits.
    """
    header, descriptor = _header(come_from, takes_descriptor=takes_descriptor)
    if not header:
        return None
    try:
        text_bytes, body_bytes = _lengths(header + _exactly(come_from, _HEADER.size - len(header)), max_bytes)
        says = _object(_exactly(come_from, text_bytes))
        return Frame(says=says, body=_exactly(come_from, body_bytes), descriptor=descriptor)
    except BaseException:
        if descriptor >= 0:
            os.close(descriptor)
        raise


def _header(come_from: socket.socket, *, takes_descriptor: bool) -> tuple[bytes, int]:
    if not takes_descriptor:
        return come_from.recv(_HEADER.size), -1
    data, beside, _, _ = come_from.recvmsg(_HEADER.size, _DESCRIPTOR, socket.MSG_CMSG_CLOEXEC)
    found = array.array("i")
    for level, kind, content in beside:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            found.frombytes(content[: len(content) - len(content) % found.itemsize])
    return data, found[0] if found else -1


def _lengths(header: bytes, max_bytes: int) -> tuple[int, int]:
    mark, text_bytes, body_bytes = _HEADER.unpack(header)
    if mark != _MARK:
        raise BrokenFrame("what came does not begin like a frame of Frostline")
    if text_bytes > _MAX_JSON or body_bytes > max_bytes:
        raise BrokenFrame(f"a frame of {text_bytes} and {body_bytes} bytes is too long")
    return text_bytes, body_bytes


def _exactly(come_from: socket.socket, nbytes: int) -> memoryview:
    view = np.empty(nbytes, np.uint8).data
    filled = 0
    while filled < nbytes:
        got = come_from.recv_into(view[filled:])
        if not got:
            raise BrokenFrame("a frame broke off")
        filled += got
    return view


def _object(text: memoryview) -> dict[str, Any]:
    try:
        value = parse_json(bytes(text))
    except (ValueError, RecursionError) as error:
        raise BrokenFrame(f"a frame holds no JSON: {error}") from error
    if not isinstance(value, dict):
        raise BrokenFrame("a frame holds no JSON object")
    return value


_ALIGNED = 64
_KINDS = frozenset(np.dtype(kind).str for kind in ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "?"))
_MAX_AXES = 16

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowBlock:
    """Neighbouring rows of a batch, from ``start`` up to ``stop``; none where only its layout is wanted."""

    batch: FeatureBatch
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(slots=True, kw_only=True, eq=False)
class Block:
    """What goes into a block.

    Attributes:
        parts: buffers, to be written one after the other from its beginning.
        nbytes: bytes of all of them.
        says: the place of each array, as plain values.
    """

    parts: list[memoryview] = field(default_factory=list)
    nbytes: int = 0
    says: dict[str, Any] = field(default_factory=dict)

    def add(self, arrays: Sequence[Array], shape: Sequence[int], dtype: np.dtype[Any]) -> dict[str, Any]:
        """Put arrays behind each other as one column, and say where it lies."""
        gap = -self.nbytes % _ALIGNED
        if gap:
            self._put(memoryview(bytes(gap)))
        at = self.nbytes
        for rows in arrays:
            self._put(np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data)
        return {"at": at, "shape": list(shape), "dtype": dtype.str}

    def _put(self, part: memoryview) -> None:
        if part.nbytes:
            self.parts.append(part)
            self.nbytes += part.nbytes


def is_alike(batch: FeatureBatch, other: FeatureBatch) -> bool:
    """Whether rows of both may lie in one block."""
    return batch is other or _layout(batch) == _layout(other)


def row_bytes(batch: FeatureBatch) -> float:
    """Payload of a row, the mean."""
    return batch.nbytes / max(1, len(batch))


def lay_out(pieces: Sequence[RowBlock], skipped: Sequence[Skipped]) -> Block:
    """A block of the rows of some batches that are alike; there is one piece at least."""
    block = Block()
    layout = pieces[0].batch
    rows = sum(map(len, pieces))
    says: dict[str, Any] = {
        "ids": block.add([piece.batch.ids[piece.start : piece.stop] for piece in pieces], [rows], np.dtype(np.int64)),
        "skipped": [[sample.id, sample.object, sample.reason, sample.changed] for sample in skipped],
        "error": max((piece.batch.error for piece in pieces if len(piece)), default=0.0),
    }
    if layout.packed:
        says["packed"] = [_lay_packed(block, pieces, place, rows) for place in range(len(layout.packed))]
    elif layout.tensors:
        says["tensors"] = [
            _lay(block, [(piece.batch.tensors[place], piece) for piece in pieces], rows)
            for place in range(len(layout.tensors))
        ]
    else:
        encoded = [sample for piece in pieces for sample in piece.batch.encoded[piece.start : piece.stop]]
        says["bounds"] = block.add([_bounds([len(sample) for sample in encoded])], [rows + 1], np.dtype(np.int64))
        says["encoded"] = block.add(
            [np.frombuffer(sample, np.uint8) for sample in encoded if len(sample)], [sum(map(len, encoded))], _BYTE
        )
    found = 0
    for part in block.parts:
        found = crc32(part, found)
    block.says = {**says, "nbytes": block.nbytes, "crc32": crc32(_told(says), found)}
    return block


def read_block(says: dict[str, Any], memory: memoryview) -> FeatureBatch:
    """The rows of a block as a batch whose arrays view it.

    Raises:
        KeyError, TypeError, ValueError: The block is not laid out as its description says, or its checksum is wrong.
    """
    ids = _column(says["ids"], memory)
    if ids.dtype != np.int64 or ids.ndim != 1:
        raise ValueError("ids are one column of integers")
    contents: dict[str, Any] = {}
    if "packed" in says:
        contents["packed"] = tuple(_read_packed(tensor, memory, len(ids)) for tensor in says["packed"])
    elif "tensors" in says:
        contents["tensors"] = tuple(_rows(_column(tensor, memory), len(ids)) for tensor in says["tensors"])
    else:
        contents["encoded"] = tuple(_encoded(says, memory, len(ids)))
    skipped = tuple(
        Skipped(id=int(id), object=str(object), reason=str(reason), changed=bool(changed))
        for id, object, reason, changed in says["skipped"]
    )
    told = {name: value for name, value in says.items() if name in _LAYOUT}
    if crc32(_told(told), crc32(memory[: says["nbytes"]])) != says["crc32"]:
        raise ValueError("its checksum is another than it was written with")
    return FeatureBatch(ids=ids, skipped=skipped, error=float(says["error"]), **contents)


_BYTE = np.dtype(np.uint8)
# What says where rows lie, and is in the checksum; the rest of a frame is about the block.
_LAYOUT = ("ids", "skipped", "error", "packed", "tensors", "bounds", "encoded")


def _told(says: dict[str, Any]) -> bytes:
    return json.dumps(says, sort_keys=True).encode()


def _layout(batch: FeatureBatch) -> tuple[object, ...]:
    packed = tuple(
        (tensor.codec, tensor.shape, tensor.dtype, tensor.bounds is None, tensor.scale is None)
        for tensor in batch.packed
    )
    return packed, tuple((tensor.shape[1:], tensor.dtype) for tensor in batch.tensors)


def _bounds(lengths: Sequence[int]) -> npt.NDArray[np.int64]:
    bounds = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=bounds[1:])
    return bounds


def _lay(block: Block, columns: Sequence[tuple[Array, RowBlock]], rows: int) -> dict[str, Any]:
    first, _ = columns[0]
    return block.add(
        [array[piece.start : piece.stop] for array, piece in columns], [rows, *first.shape[1:]], first.dtype
    )


def _lay_packed(block: Block, pieces: Sequence[RowBlock], place: int, rows: int) -> dict[str, Any]:
    packed = [(piece.batch.packed[place], piece) for piece in pieces]
    layout, _ = packed[0]
    says: dict[str, Any] = {"codec": layout.codec, "shape": list(layout.shape), "dtype": layout.dtype.str}
    if layout.bounds is None:
        says["body"] = _lay(block, [(tensor.body, piece) for tensor, piece in packed], rows)
    else:
        lengths, bodies = _by_row(packed)
        says["bounds"] = block.add([_bounds(lengths)], [rows + 1], np.dtype(np.int64))
        says["body"] = block.add(bodies, [sum(lengths)], _BYTE)
    if layout.scale is not None:
        says["scale"] = _lay(block, [(_present(tensor.scale), piece) for tensor, piece in packed], rows)
    return says


def _by_row(packed: Sequence[tuple[PackedTensor, RowBlock]]) -> tuple[list[int], list[Array]]:
    """How long each row is, and the bytes of each piece's rows."""
    lengths: list[int] = []
    bodies: list[Array] = []
    for tensor, piece in packed:
        bounds = _present(tensor.bounds)[piece.start : piece.stop + 1]
        lengths += np.diff(bounds).tolist()
        bodies.append(tensor.body[bounds[0] : bounds[-1]])
    return lengths, bodies


def _present(array: Array | None) -> Array:
    assert array is not None, "rows that are alike have the same columns"
    return array


def _column(says: dict[str, Any], memory: memoryview) -> Array:
    """A column, checked: it lies within the block, and its values are numbers."""
    at, shape = says["at"], tuple(says["shape"])
    if says["dtype"] not in _KINDS or len(shape) > _MAX_AXES or not all(type(size) is int for size in (at, *shape)):
        raise ValueError("a column says no place, shape or type")
    if at < 0 or min(shape, default=0) < 0:
        raise ValueError("a column lies outside its block")
    dtype = np.dtype(says["dtype"])
    count = math.prod(shape)
    if not count:
        return np.empty(shape, dtype)
    return np.frombuffer(memory, dtype, count, at).reshape(shape)


def _rows(array: Array, rows: int) -> Array:
    if not array.ndim or len(array) != rows:
        raise ValueError(f"a column does not have {rows} rows")
    return array


def _whole_bounds(says: dict[str, Any], memory: memoryview, rows: int, nbytes: int) -> npt.NDArray[np.int64]:
    bounds = _rows(_column(says, memory), rows + 1)
    if bounds.dtype != np.int64 or bounds.ndim != 1:
        raise ValueError("bounds are one column of integers")
    if bounds[0] != 0 or bounds[-1] != nbytes or (np.diff(bounds) < 0).any():
        raise ValueError("rows do not lie one after the other")
    return bounds


def _encoded(says: dict[str, Any], memory: memoryview, rows: int) -> Iterator[memoryview]:
    body = _column(says["encoded"], memory)
    bounds = _whole_bounds(says["bounds"], memory, rows, body.nbytes)
    view = body.data
    for start, stop in pairwise(bounds.tolist()):
        yield view[start:stop]


def _read_packed(says: dict[str, Any], memory: memoryview, rows: int) -> PackedTensor:
    if says["codec"] not in CODECS or says["dtype"] not in _KINDS:
        raise ValueError("rows that are packed in no way that there is")
    body = _column(says["body"], memory)
    bounds = _whole_bounds(says["bounds"], memory, rows, body.nbytes) if "bounds" in says else None
    return PackedTensor(
        codec=says["codec"],
        shape=tuple(map(int, says["shape"])),
        dtype=np.dtype(says["dtype"]),
        body=body if bounds is not None else _rows(body, rows),
        bounds=bounds,
        scale=_rows(_column(says["scale"], memory), rows) if "scale" in says else None,
    )
